"""A reference program of a few elements, for tests that run one in a child or a scene."""

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = torch.nn.LayerNorm(n)
    def forward(self, x):
        return self.ln(x)
def get_inputs():
    return [torch.rand(4, 12)]
def get_init_inputs():
    return [12]
"""
