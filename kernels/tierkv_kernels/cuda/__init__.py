"""Attention on CUDA devices: the driver, the compiler, their cache, and the launch.

Nothing here is loaded before it is used, and only ``backend`` needs torch.
"""
