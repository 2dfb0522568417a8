"""(x - mean) / sqrt(var + eps) over groups of channels: group_norm; instance_norm is that of groups of one."""
