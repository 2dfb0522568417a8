"""Everything that touches KernelBench, and nothing else does: checkout, task, candidate, evaluator."""
