"""Experts of a layer's MLP in config.json: how many there are, and how a token's are chosen. No torch."""

from typing import Literal, NamedTuple

from pdkv.errors import ModelError
from pdkv.models.json_fields import Fields


class Experts(NamedTuple):
    """MLPs of which each token takes a few, chosen by a score that a router gives each of them."""

    layers: tuple[int, ...]  # that have them; the others have one MLP
    num: int
    chosen: int  # by each token
    size: int  # neurons of each
    shared_size: int = 0  # neurons of those that every token takes beside the chosen ones
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False  # added to scores for the choice alone
    normalised: bool = True  # a token's weights are divided by their sum
    scale: float = 1.0  # and multiplied by this
    groups: int = 1  # of neighbouring experts
    chosen_groups: int = 1  # by each token, which takes no expert of the others
    group_best: int = 1  # scores whose sum is a group's

    @property
    def neurons(self) -> int:
        """Neurons that a token goes through."""
        return self.chosen * self.size + self.shared_size


def check_experts(fields: Fields, experts: Experts) -> Experts:
    """The same experts.

    Raises:
        ModelError: numbers that contradict each other.
    """
    wrong = None
    if experts.chosen > experts.num:
        wrong = f"{experts.chosen} experts for each token (num_experts_per_tok), but only {experts.num} experts"
    elif experts.num % experts.groups:
        wrong = f"{experts.num} experts cannot be divided into {experts.groups} groups (n_group)"
    elif experts.chosen_groups > experts.groups:
        wrong = f"{experts.chosen_groups} groups for each token (topk_group), but only {experts.groups} (n_group)"
    elif experts.chosen > experts.chosen_groups * (experts.num // experts.groups):
        wrong = f"{experts.chosen_groups} groups (topk_group) have fewer than {experts.chosen} experts for each token"
    elif experts.groups > 1 and experts.num // experts.groups < experts.group_best:
        wrong = f"groups of {experts.num // experts.groups} experts, of which {experts.group_best} best are wanted"
    if wrong is not None:
        raise ModelError(f"{fields.path}: {wrong}")
    return experts


def num_experts(fields: Fields, name: str, default: int) -> int:
    """The number of experts by the field `name`, or by `num_local_experts`, as transformers 5 writes it.

    Raises:
        ModelError: a wrong value, or two that differ.
    """
    told = {fields.count(each) for each in (name, "num_local_experts") if fields.values.get(each) is not None}
    if len(told) > 1:
        raise ModelError(f"{fields.path}: fields {name!r} and 'num_local_experts' differ: {sorted(told)}")
    return told.pop() if told else default


def sparse_layers(fields: Fields) -> tuple[int, ...]:
    """The layers with experts: every `decoder_sparse_step`-th, without `mlp_only_layers`. Raises ModelError."""
    num_layers, step = fields.count("num_hidden_layers"), fields.count("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < num_layers for i in dense):
        raise ModelError(
            f"{fields.path}: field 'mlp_only_layers' must list some of the {num_layers} layers, got {dense!r:.80}"
        )
    return tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)
