"""A simulated CANN on which the real torch_npu runs: devices, streams, kernels, graphs and collectives, on the host."""
