"""The stress verdict: the case suite (eval/suite) against native and against float64."""
