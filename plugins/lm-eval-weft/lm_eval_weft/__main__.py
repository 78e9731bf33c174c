"""The harness's command with the model `weft` registered.

Releases up to 0.4.13 do not read entry points of models.
"""

from lm_eval.__main__ import cli_evaluate

from . import WeftLM as WeftLM

if __name__ == "__main__":
    cli_evaluate()
