# An image that runs both scripts. Build it, look whether it trains, and train for good:
#   docker build -t cleanrl-distributed .
#   docker run --rm cleanrl-distributed python ppo_atari.py --total-timesteps 1024
#   mkdir -p runs && docker run --gpus all --shm-size 1g --user "$(id -u):$(id -g)" -v "$PWD/runs:/train/runs" \
#     cleanrl-distributed python -m cleanrl_utils.launch --standalone --nproc_per_node=2 ppo_atari_multigpu.py \
#     --run-name first --resume
# The base needs Python 3.10 or newer with venv. It is no CUDA image: torch's wheels bring their own CUDA runtime, cuDNN
# and NCCL and load no others, so that nothing would read those of a CUDA base; the host brings the driver.
# No X server and no libGL: the emulator draws into memory.
ARG BASE=python:3.12-slim
FROM ${BASE}

# An index with torch for the CPU only keeps CUDA out, for 1.8 GB in all: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
RUN python3 -m venv /opt/venv
# HOME is where any user may write, also one that is not in /etc/passwd.
ENV PATH=/opt/venv/bin:$PATH HOME=/train PYTHONUNBUFFERED=1
WORKDIR /train
# Dependencies first, against a stub of the package, so that an edited file does not install them again.
COPY pyproject.toml constraints.txt ./
RUN mkdir cleanrl_utils && touch README.md cleanrl_utils/__init__.py \
    && pip install --no-cache-dir --constraint constraints.txt --editable '.[s3,video]'
COPY cleanrl_utils cleanrl_utils
COPY LICENSE ppo_atari.py ppo_atari_multigpu.py ./
# Runs are written to the working folder, whatever user the container is given. By number, so that Kubernetes sees that
# it is not root.
RUN chmod 1777 .
USER 1000:1000
CMD ["python", "ppo_atari.py", "--help"]
