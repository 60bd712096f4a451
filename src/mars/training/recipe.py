"""Recipes: all options of a training run, read from a YAML file."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from mars.errors import MarsError
from mars.method.acceptance import Dial

GATED_OPTIONS = {"r", "lora_alpha", "target_modules"}  # of lora
BlockSize = Annotated[int, Field(ge=2)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Section):
    train: list[str] = Field(min_length=1)  # files, folders or hub names; see `mars.training.rows`
    held_out: Annotated[int, Field(ge=0)] | list[str] = 64
    """For evaluation: the number of chats that are not trained on, or sources of their own"""
    length: int = Field(default=1024, ge=8)  # tokens of a row
    packing: bool = True  # several chats in a row; else one, padded
    bad_rows: Literal["skip", "stop"] = "skip"
    long_rows: Literal["drop", "cut"] = "drop"


class Streams(Section):
    """What the masked stream of a step looks like."""

    block_size: BlockSize | Annotated[list[BlockSize], Field(min_length=1)] = 4
    """Tokens that one forward predicts; of a list, one is drawn for every step"""
    anchors: Literal["random", "fixed"] = "random"
    """``fixed`` is the paper's layout: the answers are divided into blocks of ``block_size`` masks"""
    masked: float = Field(default=0.5, gt=0)  # masks per clean token, with random anchors

    @property
    def block_sizes(self) -> list[int]:
        return [self.block_size] if isinstance(self.block_size, int) else self.block_size


class Loss(Section):
    """How much each part of the loss counts."""

    clean: float = Field(default=1.0, ge=0)  # cross-entropy of the clean stream
    labels: float = Field(default=0.2, ge=0)  # cross-entropy of the masks with the text's own tokens
    distill: float = Field(default=0.8, ge=0)
    """KL of the masks to the clean stream's predictions for the same tokens, in the same forward"""
    base: float = Field(default=0.0, ge=0)
    """KL of the clean stream to the base model, which keeps the one-token mode as it was"""
    decay: float = Field(default=1.0, gt=0, le=1)  # weight of each mask of a group, relative to the mask before it


class Stage(Section):
    stage: Literal["ar", "mars"]
    streams: Streams = Streams()
    loss: Loss = Loss()
    trainer: dict[str, Any] = {}  # options of transformers' TrainingArguments, on top of the recipe's


class Recipe(Section):
    model: str
    output: Path
    data: Data
    stages: list[Stage] = Field(min_length=1)
    lora: dict[str, Any] | None = None  # options of peft's LoraConfig; without it all weights are trained
    adapter: Literal["gated", "merged"] | None = None
    """With ``lora``: ``gated``, the default, acts at mask positions alone and leaves the base model as it is;
    ``merged``, the paper's form, is merged into the weights"""
    markov_rank: int = Field(default=128, ge=0)  # of a gated adapter's Markov head; 0: none
    from_adapter: Path | None = None
    """The folder of an adapter to start from, made with the same ``lora`` options on the same model"""
    dial: Annotated[str, AfterValidator(lambda text: str(Dial.parse(text)))] = "exact"
    """The dial that the finished checkpoint decodes with"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of the finished checkpoint's weights
    seed: int = Field(default=0, ge=0, lt=2**31)
    compile: bool = False  # compile the layers (worth it on a GPU for runs of more than a minute)
    trainer: dict[str, Any] = {}  # options of transformers' TrainingArguments for every stage

    @model_validator(mode="after")
    def _adapter_needs_lora(self) -> Self:
        if self.from_adapter is not None and self.lora is None:
            raise ValueError("to go on from an adapter, say in lora how it was made")
        if self.adapter is not None and self.lora is None:
            raise ValueError(f"a {self.adapter} adapter needs lora; without it all weights are trained")
        return self

    @model_validator(mode="after")
    def _gated_trains_masks(self) -> Self:
        if not self.gated:
            return self
        for stage in self.stages:
            if stage.stage == "ar":
                raise ValueError("a gated adapter leaves the base model as it is, so it has no ar stage")
            for name in ("clean", "base"):
                if name in stage.loss.model_fields_set and getattr(stage.loss, name):
                    rule = "the clean stream of a gated adapter is the base model itself"
                    raise ValueError(f"loss.{name} has no effect: {rule}; leave it out, or train adapter: merged")
        if unknown := set(self.lora or ()) - GATED_OPTIONS:
            names = ", ".join(sorted(GATED_OPTIONS))
            raise ValueError(f"lora.{min(unknown)} is not an option of a gated adapter, which has {names}")
        for number, stage in enumerate(self.stages):  # as a recipe that was written to a file can be read again
            loss = stage.loss.model_copy(update={"clean": 0.0})
            self.stages[number] = stage.model_copy(update={"loss": loss})
        return self

    @property
    def gated(self) -> bool:
        return self.lora is not None and self.adapter != "merged"

    @property
    def block_size(self) -> int:
        """The largest block size of the recipe; without a MARS stage, the one for evaluation."""
        return max((max(each.streams.block_sizes) for each in self.stages if each.stage == "mars"), default=4)

    @property
    def trains_masks(self) -> bool:
        return any(stage.stage == "mars" for stage in self.stages)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; raises with one sentence that says what is wrong with it."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise MarsError(f"the recipe {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MarsError(f"the recipe {path} is not YAML: {error}") from None
    return parse_recipe(content, str(path))


def parse_recipe(content: object, name: str = "recipe") -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'file'}: {each['msg']}" for each in error.errors())
        raise MarsError(f"{name} is not a usable recipe: {wrong}") from None
