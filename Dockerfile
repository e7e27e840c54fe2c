# The main job in a container, on CPUs; it has been built nowhere yet (docs/guide/installing.md).
#   docker build -t simbal .
#   docker run -v "$PWD/outputs:/simbal/outputs" simbal                 # make sweep; another target, with its values, goes last
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /simbal

# the libraries first, as a change of the code does not change them; pip heeds these, such as for a torch without CUDA
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml constraints.txt README.md Makefile ./
RUN mkdir src && make setup

COPY . .
ENTRYPOINT ["make"]
CMD ["sweep"]
