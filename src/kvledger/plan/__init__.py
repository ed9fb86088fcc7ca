"""Arithmetic on specs: the six ledgers, plans, levers, search, engine profiles. No tensors, no clock.

The package can be called: `from kvledger import plan; plan("llama-3.1-70b", "h100-sxm", tp=2)` is
`plan.planner.plan(...)`. Python binds a sub-package to its parent's attribute on import, so a function of the same
name could not survive there; a module whose class has `__call__` serves both meanings.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from kvledger.plan.planner import plan

        return plan(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
