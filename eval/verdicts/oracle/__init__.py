"""The oracle verdict: how far the reference and a candidate are from the float64 answer, over the suite's cases."""
