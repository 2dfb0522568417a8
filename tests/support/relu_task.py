"""A task of one elementwise step, as text, and a file that is right: what several tests of the commands judge."""

TASK = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(4, 4)]
def get_init_inputs():
    return []
"""
GOOD = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x.clamp(min=0)\n"
