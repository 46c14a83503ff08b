"""A schema from a class."""

from enum import Enum

from pydantic import BaseModel
from script_answers import MODEL, QUESTIONS

from pdkv import LLM, SamplingParams, StructuredOutputsParams


class CarType(str, Enum):
    sedan = "sedan"
    suv = "SUV"


class CarDescription(BaseModel):
    electric: bool
    car_type: CarType


if __name__ == "__main__":
    json_schema = CarDescription.model_json_schema()
    structured_outputs_params = StructuredOutputsParams(json=json_schema, disable_fallback=True)
    sampling_params = SamplingParams(structured_outputs=structured_outputs_params, max_tokens=50, seed=1)
    for output in LLM(model=MODEL).generate(QUESTIONS, sampling_params):
        assert isinstance(CarDescription.model_validate_json(output.outputs[0].text), CarDescription)
