"""What a guard raises when it cannot ask its question.

Knows no guard, rig or register, so each of them may import it.
"""


class NotApplicable(Exception):
    """A guard cannot ask its question of this task, candidate or machine; the message says why."""
