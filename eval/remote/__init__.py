"""A ModelNew that lives in a confined process of its own (worker), and its stand-in for a judge (model).

Nothing is imported here: the worker must not load the judge's half.
"""
