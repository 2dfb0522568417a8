"""The case suite behind the stress and oracle verdicts: inputs, models, checks, rows."""
