"""The tables of blind spots: a line a task, and how many tasks are what. Read from results/<gpu>/blindspots/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kbsub.eval.report.tables import NOTHING, Table
from kbsub.eval.results.blindspots import MEANING, SEVERITIES, BlindSpots

_NAMED = 4  # accepted variants named in a task's line
_SOUND_NAMED = 40


def task_words(record: BlindSpots) -> str:
    """ "L1/37 FrobeniusNorm" of level1_37, 37_FrobeniusNorm_.py."""
    level, _, number = record.task.removeprefix("level").partition("_")
    title = record.name.removesuffix(".py").removeprefix(f"{number}_").strip("_").replace("_", " ")
    return f"L{level}/{number} {title}" if title != record.task.replace("_", " ") else f"L{level}/{number}"


def share_words(share: float) -> str:
    return f"{share:.2g}"


def accepted_words(record: BlindSpots) -> str:
    """What it accepts, worst first, each with the share of the tolerance that it uses."""
    shown = {row.words: row for row in reversed(record.accepted())}
    rows = list(reversed(shown.values()))
    words = [f"{row.words} ({share_words(row.share)})" for row in rows[:_NAMED]]
    more = [f"{len(rows) - _NAMED} more"] if len(rows) > _NAMED else []
    return "; ".join([*words, *more]) or NOTHING


def refused_words(record: BlindSpots) -> str:
    """What ought to pass and does not, with the tolerances that it is off by."""
    parts = []
    for row in record.refused():
        if row.why:
            parts.append(row.why)
            continue
        count = f", {row.failing[0]} of {row.failing[1]} elements" if row.failing else ""
        parts.append(f"{row.name} ({share_words(row.share)} tolerances{count}, trial {row.failed_at})")
    return "; ".join(parts) or NOTHING


def blindspots_table(records: Sequence[BlindSpots]) -> Table:
    """A line a task: severities, what is accepted, what right answers fail, how many variants were tried."""
    table = Table(
        "blind spots", ["task", "blind to", "accepts (share of the tolerance)", "refuses", "tried"], prose=True
    )
    for record in records:
        if not record.variants:
            table.rows.append([task_words(record), "not tried", record.error or NOTHING, NOTHING, "0"])
            continue
        failed = sum(row.passed is False for row in record.variants)
        left = f", {len(record.not_tried)} not" if record.not_tried else ""
        tried = f"{len(record.variants)} ({failed} fail{left})"
        named = ", ".join(record.severities())
        table.rows.append([task_words(record), named, accepted_words(record), refused_words(record), tried])
    table.notes = notes(records)
    return table


def notes(records: Sequence[BlindSpots]) -> list[str]:
    """Where and how it was made, what was tried and what was not."""
    if not records:
        return []
    made = {(r.environment.gpu, r.environment.torch, r.environment.driver) for r in records if r.environment}
    where = "; ".join(
        f"{gpu or 'CPU'}, torch {torch}, driver {driver or 'none'}" for gpu, torch, driver in sorted(made, key=str)
    )
    sizes = Counter(record.size for record in records)
    tried, left = (
        sum(len(r.variants) for r in records),
        Counter(reason(row.why) for r in records for row in r.not_tried),
    )
    words = [
        f"{where}. {len(records)} tasks at the {', '.join(f'{size} size ({n})' for size, n in sizes.items())}, "
        f"{tried} variants tried through upstream's predicate and trial seeds, {sum(r.seconds for r in records):.0f} s "
        "of one process each."
    ]
    if left:
        words.append("Not tried: " + "; ".join(f"{count} {why}" for why, count in left.most_common(8)) + ".")
    return words


def reason(why: str) -> str:
    """A reason without the numbers of its case, so that like ones are counted together."""
    head = why.partition(":")[0]
    if why.startswith("axis") and "too short" in why:
        return "parts of an axis that is too short"
    if "calls are tried" in why or "parameters are tried" in why:
        return "rests of calls or parameters beyond the most that are tried"
    return head[:80]


def counts_table(records: Iterable[BlindSpots]) -> Table:
    """How many tasks of each level are blind to what; a task counts in every line that is true of it."""
    found = list(records)
    levels = sorted({record.task.partition("_")[0] for record in found})
    table = Table(
        "blind spots by severity", ["severity", "means", *[f"level {each[5:]}" for each in levels]], prose=True
    )
    for severity in SEVERITIES:
        of = [sum(r.task.startswith(f"{level}_") and severity in r.severities() for r in found) for level in levels]
        table.rows.append([severity, MEANING[severity], *map(str, of)])
    untried = [sum(r.task.startswith(f"{level}_") and not r.variants for r in found) for level in levels]
    table.rows.append(["not tried", "the task did not run here; its line says why", *map(str, untried)])
    sound = [task_words(record) for record in found if record.severities() == ["sound"]]
    if sound:
        more = f" and {len(sound) - _SOUND_NAMED} more" if len(sound) > _SOUND_NAMED else ""
        table.notes = [f"Sound, every wrong variant fails ({len(sound)}): {', '.join(sound[:_SOUND_NAMED])}{more}."]
    return table
