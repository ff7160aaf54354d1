# thinpipe from its own wheel, for a user without rights. How to build and run it: docs/howto/cloud-gpus.md
FROM python:3.11-slim AS wheel
RUN pip install --no-cache-dir build hatchling
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m build --wheel --no-isolation --outdir /wheels

FROM python:3.11-slim
# The CPU build of torch by default; https://pypi.org/simple has the one with CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Which extras of pyproject.toml come with it.
ARG EXTRAS=swarm,report
COPY .ci/constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch$(sed -n 's/^torch==/==/p' /tmp/constraints.txt)" \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/*.whl)[$EXTRAS]" \
    && useradd --create-home --uid 1000 thinpipe \
    && mkdir /work \
    && chown thinpipe /work
USER thinpipe
WORKDIR /work
ENTRYPOINT ["thinpipe"]
CMD ["--help"]
