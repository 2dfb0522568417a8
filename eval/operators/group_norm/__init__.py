"""(x - mean) / sqrt(var + eps) over groups of channels of an image: group_norm, and instance_norm as the groups of one."""
