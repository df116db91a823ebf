"""The frameworks' own loss functions, as installed, on the batches and settings that `framework_loss` takes: the two can be compared.

    native_loss("trl.dapo", inputs, beta=0.04)            # GRPOTrainer._compute_loss of the installed TRL
    framework_loss("trl.dapo", inputs, beta=0.04).loss    # nanscope's objective under the same settings

Notable: the loss functions are the framework's, unchanged. What an adapter adds is what the framework's trainer would have put around the
call (config object, batch keys, counts of one rank), and its docstring says so. A setting that is left out has the framework's default.
Frameworks are imported when a loss is asked for, never before; what one of them raises for a batch passes through.
"""

from nanscope.native.loss import import_failure, installed, native_keys, native_loss

__all__ = ["import_failure", "installed", "native_keys", "native_loss"]
