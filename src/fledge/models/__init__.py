"""Targets and drafters as plain `nn.Module`s."""
