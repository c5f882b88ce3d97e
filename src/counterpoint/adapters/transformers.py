"""transformers: a callback by which its Trainer's FSDP2 steps are overlapped.

    trainer.add_callback(counterpoint.adapters.transformers.Overlap())

The Trainer shards the model by accelerate, with `fsdp_config={"version": 2}` or a
DistributedConfig, before its first step: the callback then calls `counterpoint.overlap` on it.
"""

from typing import Any

from counterpoint.adapters.seams import taken
from counterpoint.fsdp.overlap import overlap
from counterpoint.fsdp.overlapped import Overlapped
from counterpoint.fsdp.torch_parts import states_of

TESTED = "5.24.0"
Callback: Any
(Callback,) = taken("transformers", TESTED, "transformers", "TrainerCallback")


class Overlap(Callback):
    """Overlaps the model of a Trainer once it is sharded, and ends that with the training.

    Args:
        options: of `counterpoint.overlap`.

    Attributes:
        overlapped: what `counterpoint.overlap` returned; None before the training.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self.overlapped: Overlapped | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Overlap it.

        Raises:
            InputError: the Trainer has not sharded its model by FSDP2, or an option is wrong.
        """
        self.overlapped = overlap(kwargs["model"], **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model back to torch, as it is to be saved or evaluated."""
        if self.overlapped is not None and states_of(kwargs["model"]):
            self.overlapped.off()
