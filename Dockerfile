# An image that runs both scripts:
#   docker build -t cleanrl-distributed .
#   docker run --gpus all --shm-size 1g -v "$PWD/out:/train/runs" cleanrl-distributed \
#     python -m cleanrl_utils.launch --standalone --nproc_per_node=2 ppo_atari_multigpu.py --run-name first --resume
# torch's wheels bring CUDA, the host brings the driver. No X server and no libGL: the emulator draws into memory.
ARG BASE=python:3.12-slim
FROM ${BASE}
WORKDIR /train
# Dependencies first, against a stub of the package, so that an edited script does not install them again.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir cleanrl_utils && touch cleanrl_utils/__init__.py \
    && python -m pip install --no-cache-dir --constraint constraints.txt --editable '.[s3,video]'
COPY cleanrl_utils cleanrl_utils
COPY ppo_atari.py ppo_atari_multigpu.py ./
# Runs write to the working folder, whatever user the container is given.
RUN useradd trainer && chmod 1777 .
USER trainer
CMD ["python", "ppo_atari.py", "--help"]
