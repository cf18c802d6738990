"""What the documents of the fused kernels demand and neither torch_npu's schemas nor its meta kernels check.

A call that breaks a rule is refused when it is made, as CANN does. Sources: the documentation that torch_npu 2.13
carries (``torch_npu/_op_plugin_docs.py``) and the pages of the aclnn functions. What a rule says of elements that
earlier kernels write (block ids, slots, top-k) is checked by the kernel when it runs: real hardware does not.

Importing this package registers the checks.
"""

from ascend_sim.contract import attention, fused, kv_cache, sampling

__all__ = ["attention", "fused", "kv_cache", "sampling"]
