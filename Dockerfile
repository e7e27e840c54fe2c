# Run `make sweep` in a container on CPUs. Untested (docs/guide/installing.md).
#   docker build -t simbal .
#   docker run -v "$PWD/outputs:/simbal/outputs" simbal                 # make sweep; append another target and its values
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /simbal

# install libraries first, so that code changes do not rebuild this layer; pip reads these variables, for example for torch without CUDA
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml constraints.txt README.md Makefile ./
RUN mkdir src && make setup

COPY . .
ENTRYPOINT ["make"]
CMD ["sweep"]
