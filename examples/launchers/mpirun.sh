#!/usr/bin/env bash
# What mpirun says in its own words, in torch's: mpirun -np 4 --hostfile hosts examples/launchers/mpirun.sh python train.py
#
# MASTER_ADDR: the host of rank 0 (default: this one, right where all ranks are on one machine); MASTER_PORT: default 29500.
# Open MPI: hand settings on with -x, as in `mpirun -x MASTER_ADDR -x HYBRIDPS_TOKEN_FILE ...`. MPICH's Hydra hands on all.
set -eu
case ${1:---help} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
export RANK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:?this is run by mpirun}}
export WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:?}}
export LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:?}}
export LOCAL_WORLD_SIZE=${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:?}}
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)} MASTER_PORT=${MASTER_PORT:-29500}
exec "$@"
