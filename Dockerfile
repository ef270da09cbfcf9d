# The image of the Helm chart: kvstore-server and kvstore, as a user without rights.
# Build it from the root of a checkout: docker build -t kvstore:0.1.0 .
# With the gpu tier: docker build --build-arg EXTRAS=tracing,gpu -t kvstore:0.1.0-cuda .
# A base that cannot change under the tag: --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm
FROM $BASE AS build
WORKDIR /build
COPY . .
# Without torch: the server and the numpy client need none; the gpu tier does.
ARG EXTRAS=tracing
# A compiler for the loops over payload bytes; the image itself has none.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
RUN python -m venv /opt/kvstore && \
    /opt/kvstore/bin/pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

FROM $BASE
LABEL org.opencontainers.image.title="kvstore" \
      org.opencontainers.image.description="A distributed, multi-tier KV-cache storage service for LLM inference." \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 kvstore && \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin kvstore && \
    install -d -o 10001 -g 10001 -m 0700 /run/kvstore /run/kvstore-own /var/lib/kvstore
COPY --from=build /opt/kvstore /opt/kvstore
ENV PATH=/opt/kvstore/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 7420 7421 7422 7423 9420
ENTRYPOINT ["kvstore-server"]
