/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated host's nvidia-smi: lists the GPUs that libnvidia-ml.so.1 reports, one a line in
 * the form of `nvidia-smi -L`, and below each its MIG devices.  `-i GPU -c MODE` does nothing.  Exits
 * 0; 12 if the library cannot be loaded; 15 if a GPU is lost; 9 if the driver does not answer, as
 * the real program does.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *library;

static void *entry(const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "nvidia-smi: %s\n", dlerror());
        exit(12);
    }
    return found;
}

/* nvmlDeviceAttributes_t */
struct attributes {
    unsigned unused[6];
    unsigned gpu_slices;
    unsigned compute_slices;
    unsigned long long mem_mib;
};

/* List the MIG devices of *gpu*; none with a library that knows no MIG. */
static void list_migs(void *gpu)
{
    int (*mode)(void *, unsigned *, unsigned *);
    int (*count)(void *, unsigned *);
    int (*by_index)(void *, unsigned, void **);
    int (*attributes)(void *, struct attributes *);
    int (*uuid)(void *, char *, unsigned);
    unsigned current = 0;
    unsigned pending = 0;
    unsigned most = 0;

    mode = (int (*)(void *, unsigned *, unsigned *))dlsym(library, "nvmlDeviceGetMigMode");
    count = (int (*)(void *, unsigned *))dlsym(library, "nvmlDeviceGetMaxMigDeviceCount");
    by_index = (int (*)(void *, unsigned, void **))dlsym(library,
                                                         "nvmlDeviceGetMigDeviceHandleByIndex");
    attributes = (int (*)(void *, struct attributes *))dlsym(library,
                                                             "nvmlDeviceGetAttributes_v2");
    uuid = (int (*)(void *, char *, unsigned))entry("nvmlDeviceGetUUID");
    if (!mode || !count || !by_index || !attributes)
        return;
    if (mode(gpu, &current, &pending) != 0 || !current || count(gpu, &most) != 0)
        return;
    for (unsigned i = 0; i < most; i++) {
        struct attributes found;
        char profile[64];
        char mig_uuid[512];
        void *mig;

        if (by_index(gpu, i, &mig) != 0 || attributes(mig, &found) != 0 ||
            uuid(mig, mig_uuid, sizeof mig_uuid) != 0)
            continue;
        snprintf(profile, sizeof profile, "%ug.%llugb", found.gpu_slices,
                 (found.mem_mib + 512) / 1024);
        printf("  MIG %-11s Device %2u: (UUID: %s)\n", profile, i, mig_uuid);
    }
}

int main(int argc, char **argv)
{
    int (*init)(void);
    int (*count)(unsigned *);
    int (*by_index)(unsigned, void **);
    int (*name)(void *, char *, unsigned);
    int (*uuid)(void *, char *, unsigned);
    const char *(*error)(int);
    unsigned gpus = 0;
    int status = 0;
    int code;

    if (argc == 5 && strcmp(argv[1], "-i") == 0 && strcmp(argv[3], "-c") == 0)
        return 0;
    if (argc > 2 || (argc == 2 && strcmp(argv[1], "-L") != 0)) {
        fprintf(stderr, "nvidia-smi: usage: nvidia-smi [-L]\n");
        return 6;
    }
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "nvidia-smi: %s\n", dlerror());
        return 12;
    }
    init = (int (*)(void))entry("nvmlInit_v2");
    count = (int (*)(unsigned *))entry("nvmlDeviceGetCount_v2");
    by_index = (int (*)(unsigned, void **))entry("nvmlDeviceGetHandleByIndex_v2");
    name = (int (*)(void *, char *, unsigned))entry("nvmlDeviceGetName");
    uuid = (int (*)(void *, char *, unsigned))entry("nvmlDeviceGetUUID");
    error = (const char *(*)(int))entry("nvmlErrorString");

    code = init();
    if (code == 0)
        code = count(&gpus);
    if (code != 0) {
        fprintf(stderr, "nvidia-smi: the driver does not answer: %s\n", error(code));
        return 9;
    }
    for (unsigned i = 0; i < gpus; i++) {
        char gpu_name[512];
        char gpu_uuid[512];
        void *gpu;

        code = by_index(i, &gpu);
        if (code == 0)
            code = name(gpu, gpu_name, sizeof gpu_name);
        if (code == 0)
            code = uuid(gpu, gpu_uuid, sizeof gpu_uuid);
        if (code == 0) {
            printf("GPU %u: %s (UUID: %s)\n", i, gpu_name, gpu_uuid);
            list_migs(gpu);
        } else {
            fprintf(stderr, "nvidia-smi: GPU %u: %s\n", i, error(code));
            status = 15;
        }
    }
    return status;
}
