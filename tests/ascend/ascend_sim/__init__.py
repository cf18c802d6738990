"""A simulated CANN on which the real torch_npu runs: devices, streams, kernels, graphs and collectives, on the host.

``libascendcl.so`` (devices, memory, streams, events, copies, graphs), ``libhccl.so`` and ``libopapi.so`` are built from
``cann/``. Each ``aclnn`` function that has a kernel in :mod:`ascend_sim.ops` runs that Python function, on CPU tensors
that alias the device's memory, in the thread of its stream; every other one fails and says so. Nothing in the process
knows of it; its environment decides:

=========================  ==========================================================================
``LD_LIBRARY_PATH``        the folder of the built libraries (:func:`ascend_sim.build.build`)
``PYTHONPATH``             the folder of this package; ``libopapi.so`` imports it when it is first used
``ASCEND_SIM_DEVICES``     number of devices (1)
``ASCEND_SIM_MEMORY_MB``   memory of a device (4096)
``ASCEND_SIM_SOC``         name of the chip (``Ascend910B3``)
``ASCEND_SIM_COPY_US``     time of an asynchronous copy (0)
``ASCEND_SIM_OP_US``       time that a kernel takes before it computes (0)
``ASCEND_SIM_LOG``         file that gets a line for each aclnn call: name, shapes, dtypes, lists, numbers
``ASCEND_SIM_FAIL``        an aclnn function, a colon, a number n: its n-th call fails on the device
``ASCEND_SIM_ALLOW_FP32``  1: let attention take float32, which no chip does, so that tokens can be compared exactly
=========================  ==========================================================================

It proves what the host does. It says nothing of a chip's numerics, limits or speed.
"""
