/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver's nvidia-cuda-mps-control of the simulated host: `-d` makes a daemon, which is a file
 * in the directory of pipes, and without arguments it takes one command from standard input.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    const char *pipes = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char path[4200];
    char command[200] = "";
    FILE *file;

    snprintf(path, sizeof path, "%s/control", pipes ? pipes : "/tmp/nvidia-mps");
    file = fopen(path, argc > 1 && strcmp(argv[1], "-d") == 0 ? "w" : "r");
    if (!file) {
        printf("Cannot find MPS control daemon process\n");
        return 1;
    }
    fclose(file);
    if (argc > 1 || !fgets(command, sizeof command, stdin))
        return 0;
    if (strcmp(command, "quit\n") == 0)
        unlink(path);
    if (strcmp(command, "get_default_active_thread_percentage\n") == 0)
        puts("50.0");
    return 0;
}
