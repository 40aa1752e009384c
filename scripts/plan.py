"""The planner: does a model fit a target, with how much cache, and how fast could it be at best?"""

from absl import app

from jaxinfer.cli.plan import main, parse_flags

if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
