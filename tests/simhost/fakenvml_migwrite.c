/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake NVML's entry points that change MIG.  The state is in the data file, so that it outlives
 * the process: `migmode GPU MODE`, `migpending GPU MODE`, `gpuinstance GPU ID PROFILE START` and
 * `computeinstance GPU GPUINSTANCE ID SLICES` with the `mig` line of the same device.
 * `migreset GPU` makes a change of mode wait for a reset.  The faults `write-fails N CODE` and
 * `write-kills N` are for the N-th change of this process, `write-killed N` for the moment after it.
 * `profileversion N` is the newest version of the profiles' structure, 3 without it.
 * `capabilities DIRECTORY` is where the kernel lists the instances, which follows the changes.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fakenvml.h"

#define IN_USE 19
#define INSUFFICIENT_RESOURCES 23
#define ARGUMENT_VERSION_MISMATCH 25
#define MAX_LINE 2048

/* The profiles of a GPU with seven compute and eight memory slices. */
static const struct profile {
    unsigned number; /* NVML_GPU_INSTANCE_PROFILE_* */
    unsigned id;
    unsigned slices;
    unsigned limit;
    unsigned size;
    const char *attribute;
    unsigned starts[8];
    unsigned start_count;
} profiles[] = {
    {0, 19, 1, 7, 1, "", {0, 1, 2, 3, 4, 5, 6}, 7},
    {1, 14, 2, 3, 2, "", {0, 2, 4}, 3},
    {2, 9, 3, 2, 4, "", {0, 4}, 2},
    {3, 5, 4, 1, 4, "", {0}, 1},
    {4, 0, 7, 1, 8, "", {0}, 1},
    {7, 20, 1, 1, 1, "+me", {0, 1, 2, 3, 4, 5, 6}, 7},
    {9, 15, 1, 4, 2, "", {0, 2, 4, 6}, 4},
};
#define PROFILES (sizeof profiles / sizeof *profiles)

struct instance {
    int used;
    int gpu;
    unsigned id;
    unsigned profile;
    unsigned start;
};

struct compute {
    int used;
    int gpu;
    unsigned instance;
    unsigned id;
    unsigned slices;
};

static struct instance instances[MAX_GPUS * 8];
static struct compute computes[MAX_GPUS * 8];
static unsigned writes;

static const struct profile *profile_of(unsigned id)
{
    for (unsigned i = 0; i < PROFILES; i++)
        if (profiles[i].id == id)
            return &profiles[i];
    return NULL;
}

/* Read the instances from the data file. */
static void read_instances(void)
{
    FILE *file = fopen(conf_path(), "re");
    char line[MAX_LINE];
    unsigned i = 0;
    unsigned j = 0;

    memset(instances, 0, sizeof instances);
    memset(computes, 0, sizeof computes);
    while (file && fgets(line, sizeof line, file)) {
        struct instance one = {.used = 1};
        struct compute two = {.used = 1};

        if (i < MAX_GPUS * 8 && sscanf(line, "gpuinstance %d %u %u %u", &one.gpu, &one.id,
                                       &one.profile, &one.start) == 4)
            instances[i++] = one;
        if (j < MAX_GPUS * 8 && sscanf(line, "computeinstance %d %u %u %u", &two.gpu, &two.instance,
                                       &two.id, &two.slices) == 4)
            computes[j++] = two;
    }
    if (file)
        fclose(file);
}

/*
 * Replace the data file: without the lines that begin with one of the *drops*, up to a NULL, and
 * with the lines of *add* at the end.
 */
static void rewrite(const char *const *drops, const char *add)
{
    char path[4300];
    char line[MAX_LINE];
    FILE *from = fopen(conf_path(), "re");
    FILE *to;

    snprintf(path, sizeof path, "%s.%d", conf_path(), (int)getpid());
    to = fopen(path, "we");
    while (from && to && fgets(line, sizeof line, from)) {
        int dropped = 0;

        for (const char *const *drop = drops; *drop; drop++)
            dropped |= strncmp(line, *drop, strlen(*drop)) == 0;
        if (!dropped)
            fputs(line, to);
    }
    if (to) {
        fputs(add, to);
        fclose(to);
        rename(path, conf_path());
    }
    if (from)
        fclose(from);
    refresh();
}

/* The minor number of the capability *name*; *directory* has the capabilities of instances. */
static int minor_of(const char *directory, const char *name)
{
    char path[4300];
    char word[200];
    int number;
    int result = -1;
    FILE *file;

    snprintf(path, sizeof path, "%s/../../nvidia-caps/mig-minors", directory);
    file = fopen(path, "re");
    while (file && fscanf(file, "%199s %d", word, &number) == 2)
        if (strcmp(word, name) == 0)
            result = number;
    if (file)
        fclose(file);
    return result;
}

/* Have the kernel list the instance, or no longer: a GPU instance if *compute* is -1. */
static void list_instance(int gpu, unsigned instance, int compute, int listed)
{
    FILE *conf = fopen(conf_path(), "re");
    char line[MAX_LINE];
    char directory[MAX_LINE] = "";
    char part[64];
    char name[200];
    char path[MAX_LINE + 300];
    FILE *file;

    while (conf && fgets(line, sizeof line, conf))
        sscanf(line, "capabilities %2047s", directory);
    if (conf)
        fclose(conf);
    if (!*directory)
        return;
    part[0] = '\0';
    if (compute >= 0)
        snprintf(part, sizeof part, "/ci%d", compute);
    snprintf(path, sizeof path, "%s/gpu%d", directory, gpu);
    mkdir(path, 0555);
    snprintf(path, sizeof path, "%s/gpu%d/mig", directory, gpu);
    mkdir(path, 0555);
    snprintf(path, sizeof path, "%s/gpu%d/mig/gi%u%s", directory, gpu, instance, part);
    if (listed)
        mkdir(path, 0555);
    strcat(path, "/access");
    if (listed) {
        snprintf(name, sizeof name, "gpu%d/gi%u%s/access", gpu, instance, part);
        file = fopen(path, "we");
        if (file) {
            fprintf(file, "DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
                    minor_of(directory, name));
            fclose(file);
        }
    } else {
        unlink(path);
        *strrchr(path, '/') = '\0';
        rmdir(path);
    }
}

/* Whether the fault *name* of the data file is for the present change; its code, or 1. */
static int write_fault(const char *name)
{
    FILE *file = fopen(conf_path(), "re");
    char line[MAX_LINE];
    char word[64];
    unsigned number;
    int code;
    int result = 0;

    while (file && fgets(line, sizeof line, file)) {
        code = 1;
        if (sscanf(line, "fault %63s %u %d", word, &number, &code) >= 2 &&
            strcmp(word, name) == 0 && number == writes)
            result = code;
    }
    if (file)
        fclose(file);
    return result;
}

static nvml_return begin_write(void)
{
    writes++;
    if (write_fault("write-kills"))
        kill(getpid(), SIGKILL);
    return write_fault("write-fails");
}

static nvml_return end_write(void)
{
    if (write_fault("write-killed"))
        kill(getpid(), SIGKILL);
    return SUCCESS;
}

static int is_on(const struct gpu *gpu)
{
    return gpu->mig_mode;
}

static int is_busy(const struct gpu *gpu, int instance, int compute)
{
    for (int i = 0; i < host.process_count; i++) {
        const struct process *process = &host.processes[i];

        if (process->gpu == gpu->index &&
            (instance < 0 || process->gpu_instance == (unsigned)instance) &&
            (compute < 0 || process->compute_instance == (unsigned)compute))
            return 1;
    }
    return 0;
}

EXPORT nvml_return nvmlDeviceSetMigMode(void *handle, unsigned mode, nvml_return *status)
{
    char mode_line[64];
    char pending_line[64];
    char add[200];
    struct gpu *gpu;
    nvml_return fault;

    REQUIRE(handle);
    gpu = gpu_behind(handle);
    if (as_mig(handle) || mode > 1)
        return INVALID_ARGUMENT;
    if (gpu->mig_mode < 0)
        return NOT_SUPPORTED;
    fault = begin_write();
    if (fault)
        return fault;
    read_instances();
    for (unsigned i = 0; i < MAX_GPUS * 8; i++)
        if (instances[i].used && instances[i].gpu == gpu->index && !mode)
            return IN_USE;
    if (is_busy(gpu, -1, -1) && (int)mode != gpu->mig_mode)
        return IN_USE;
    snprintf(mode_line, sizeof mode_line, "migmode %d ", gpu->index);
    snprintf(pending_line, sizeof pending_line, "migpending %d ", gpu->index);
    if (gpu->mig_reset && (int)mode != gpu->mig_mode) {
        snprintf(add, sizeof add, "%s%u\n", pending_line, mode);
        rewrite((const char *const[]){pending_line, NULL}, add);
    } else {
        snprintf(add, sizeof add, "%s%u\n", mode_line, mode);
        rewrite((const char *const[]){pending_line, mode_line, NULL}, add);
    }
    *status = SUCCESS;
    return end_write();
}

/* nvmlGpuInstanceProfileInfo_v2_t */
struct profile_info_v2 {
    unsigned version;
    unsigned id;
    unsigned is_p2p_supported;
    unsigned slices;
    unsigned instances;
    unsigned multiprocessors;
    unsigned copy_engines;
    unsigned decoders;
    unsigned encoders;
    unsigned jpegs;
    unsigned ofas;
    unsigned long long mem_mib;
    char name[96];
};

/* nvmlGpuInstanceProfileInfo_v3_t: without the second member, and with one at the end. */
struct profile_info_v3 {
    unsigned version;
    unsigned id;
    unsigned slices;
    unsigned instances;
    unsigned rest[6];
    unsigned long long mem_mib;
    char name[96];
    unsigned capabilities;
};

static unsigned profile_version(void)
{
    FILE *file = fopen(conf_path(), "re");
    char line[MAX_LINE];
    unsigned version = 3;

    while (file && fgets(line, sizeof line, file))
        sscanf(line, "profileversion %u", &version);
    if (file)
        fclose(file);
    return version;
}

EXPORT nvml_return nvmlDeviceGetGpuInstanceProfileInfoV(void *handle, unsigned number,
                                                        struct profile_info_v2 *out)
{
    const unsigned version = out->version;
    struct profile_info_v3 *v3 = (struct profile_info_v3 *)out;
    const struct gpu *gpu;

    REQUIRE(handle);
    gpu = gpu_behind(handle);
    if (as_mig(handle) || gpu->mig_mode < 0)
        return NOT_SUPPORTED;
    if (version != (sizeof(struct profile_info_v2) | 2U << 24) &&
        (version != (sizeof(struct profile_info_v3) | 3U << 24) || profile_version() < 3))
        return ARGUMENT_VERSION_MISMATCH;
    for (unsigned i = 0; i < PROFILES; i++) {
        const struct profile *one = &profiles[i];
        char name[sizeof out->name];

        if (one->number != number)
            continue;
        snprintf(name, sizeof name, "MIG %ug.%llugb%s", one->slices,
                 ((gpu->mem_mib + 1023) / 1024 * one->size + 4) / 8, one->attribute);
        if (version >> 24 == 3) {
            v3->id = one->id;
            v3->slices = one->slices;
            v3->instances = one->limit;
            v3->mem_mib = gpu->mem_mib * one->size / 8;
            memcpy(v3->name, name, sizeof name);
            return SUCCESS;
        }
        out->id = one->id;
        out->slices = one->slices;
        out->instances = one->limit;
        out->multiprocessors = 16 * one->slices;
        out->copy_engines = one->slices;
        out->mem_mib = gpu->mem_mib * one->size / 8;
        memcpy(out->name, name, sizeof name);
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}

struct placement {
    unsigned start;
    unsigned size;
};

EXPORT nvml_return nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *handle, unsigned id,
                                                                 struct placement *out,
                                                                 unsigned *count)
{
    const struct profile *profile = profile_of(id);

    REQUIRE(handle);
    if (!is_on(gpu_behind(handle)))
        return NOT_SUPPORTED;
    if (!profile)
        return INVALID_ARGUMENT;
    if (out && *count < profile->start_count)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; out && i < profile->start_count; i++)
        out[i] = (struct placement){profile->starts[i], profile->size};
    *count = profile->start_count;
    return SUCCESS;
}

/* Whether memory slices from *start* are free on *gpu*. */
static int is_free(int gpu, unsigned start, unsigned size)
{
    for (unsigned i = 0; i < MAX_GPUS * 8; i++) {
        const struct instance *one = &instances[i];
        const struct profile *profile = one->used ? profile_of(one->profile) : NULL;

        if (profile && one->gpu == gpu && one->start < start + size &&
            start < one->start + profile->size)
            return 0;
    }
    return 1;
}

static unsigned count_of(int gpu, unsigned id)
{
    unsigned count = 0;

    for (unsigned i = 0; i < MAX_GPUS * 8; i++)
        count += instances[i].used && instances[i].gpu == gpu && instances[i].profile == id;
    return count;
}

EXPORT nvml_return nvmlDeviceGetGpuInstanceRemainingCapacity(void *handle, unsigned id,
                                                             unsigned *count)
{
    const struct profile *profile = profile_of(id);
    int gpu;

    REQUIRE(handle);
    if (!profile)
        return INVALID_ARGUMENT;
    if (!is_on(gpu_behind(handle)))
        return NOT_SUPPORTED;
    gpu = gpu_behind(handle)->index;
    read_instances();
    *count = 0;
    for (unsigned i = 0; i < profile->start_count; i++)
        *count += (unsigned)is_free(gpu, profile->starts[i], profile->size);
    if (*count > profile->limit - count_of(gpu, id))
        *count = profile->limit - count_of(gpu, id);
    return SUCCESS;
}

/* The handles: indices, so that they stay valid when the file is read again. */
static void *instance_handle(int gpu, unsigned id)
{
    return (void *)(0x10000UL + (unsigned long)gpu * 64 + id);
}

/* Whether *handle* points to something: those of instances are numbers. */
int is_pointer(const void *handle)
{
    return (unsigned long)handle >= 0x400000UL;
}

static struct instance *as_instance(void *handle)
{
    unsigned long number = (unsigned long)handle - 0x10000UL;

    for (unsigned i = 0; i < MAX_GPUS * 8; i++)
        if (instances[i].used && (unsigned long)instances[i].gpu * 64 + instances[i].id == number)
            return &instances[i];
    return NULL;
}

static void *compute_handle(const struct compute *compute)
{
    return (void *)(0x100000UL + ((unsigned long)compute->gpu * 64 + compute->instance) * 8 +
                    compute->id);
}

static struct compute *as_compute(void *handle)
{
    for (unsigned i = 0; i < MAX_GPUS * 8; i++)
        if (computes[i].used && compute_handle(&computes[i]) == handle)
            return &computes[i];
    return NULL;
}

EXPORT nvml_return nvmlDeviceCreateGpuInstanceWithPlacement(void *handle, unsigned id,
                                                            const struct placement *placement,
                                                            void **out)
{
    const struct profile *profile = profile_of(id);
    unsigned new = 1;
    char add[100];
    int gpu;
    int allowed = 0;
    nvml_return fault;

    REQUIRE(handle);
    if (!profile)
        return INVALID_ARGUMENT;
    if (!is_on(gpu_behind(handle)))
        return NOT_SUPPORTED;
    gpu = gpu_behind(handle)->index;
    fault = begin_write();
    if (fault)
        return fault;
    read_instances();
    for (unsigned i = 0; i < profile->start_count; i++)
        allowed |= profile->starts[i] == placement->start;
    if (!allowed)
        return INVALID_ARGUMENT;
    if (!is_free(gpu, placement->start, profile->size) || count_of(gpu, id) >= profile->limit)
        return INSUFFICIENT_RESOURCES;
    for (unsigned i = 0; i < MAX_GPUS * 8; i++) {
        if (instances[i].used && instances[i].gpu == gpu && instances[i].id == new) {
            new ++;
            i = (unsigned)-1;
        }
    }
    snprintf(add, sizeof add, "gpuinstance %d %u %u %u\n", gpu, new, id, placement->start);
    rewrite((const char *const[]){NULL}, add);
    list_instance(gpu, new, -1, 1);
    *out = instance_handle(gpu, new);
    return end_write();
}

EXPORT nvml_return nvmlDeviceGetGpuInstances(void *handle, unsigned id, void **out,
                                             unsigned *count)
{
    unsigned n = 0;

    REQUIRE(handle);
    if (!is_on(gpu_behind(handle)))
        return NOT_SUPPORTED;
    read_instances();
    for (unsigned i = 0; i < MAX_GPUS * 8; i++)
        if (instances[i].used && instances[i].gpu == gpu_behind(handle)->index &&
            instances[i].profile == id)
            out[n++] = instance_handle(instances[i].gpu, instances[i].id);
    *count = n;
    return SUCCESS;
}

struct instance_info {
    void *device;
    unsigned id;
    unsigned profile;
    unsigned start;
    unsigned size;
};

int written_instance_info(void *handle, struct instance_info *out)
{
    const struct instance *one;

    read_instances();
    one = as_instance(handle);
    if (!one)
        return 0;
    out->device = &host.gpus[one->gpu];
    out->id = one->id;
    out->profile = one->profile;
    out->start = one->start;
    out->size = profile_of(one->profile)->size;
    return 1;
}

void *written_instance(int gpu, unsigned id)
{
    read_instances();
    return as_instance(instance_handle(gpu, id)) ? instance_handle(gpu, id) : NULL;
}

EXPORT nvml_return nvmlGpuInstanceDestroy(void *handle)
{
    const struct instance *one;
    char drop[64];
    nvml_return fault;

    REQUIRE_INIT();
    fault = begin_write();
    if (fault)
        return fault;
    read_instances();
    one = as_instance(handle);
    if (!one)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < MAX_GPUS * 8; i++)
        if (computes[i].used && computes[i].gpu == one->gpu && computes[i].instance == one->id)
            return IN_USE;
    snprintf(drop, sizeof drop, "gpuinstance %d %u ", one->gpu, one->id);
    list_instance(one->gpu, one->id, -1, 0);
    rewrite((const char *const[]){drop, NULL}, "");
    return end_write();
}

/* nvmlComputeInstanceProfileInfo_t */
struct compute_profile {
    unsigned id;
    unsigned slices;
    unsigned instances;
    unsigned rest[6];
};

static const unsigned compute_slices[] = {1, 2, 3, 4, 7};

EXPORT nvml_return nvmlGpuInstanceGetComputeInstanceProfileInfo(void *handle, unsigned number,
                                                                unsigned engine,
                                                                struct compute_profile *out)
{
    const struct instance *one;

    REQUIRE_INIT();
    read_instances();
    one = as_instance(handle);
    if (!one || engine)
        return INVALID_ARGUMENT;
    if (number >= sizeof compute_slices / sizeof *compute_slices ||
        compute_slices[number] > profile_of(one->profile)->slices)
        return NOT_SUPPORTED;
    *out = (struct compute_profile){
        .id = number,
        .slices = compute_slices[number],
        .instances = profile_of(one->profile)->slices / compute_slices[number],
    };
    return SUCCESS;
}

EXPORT nvml_return nvmlGpuInstanceCreateComputeInstance(void *handle, unsigned id, void **out)
{
    const struct instance *one;
    const struct profile *profile;
    struct compute made = {.used = 1};
    unsigned taken = 0;
    unsigned char used_index[MAX_MIGS + 1] = {0};
    char add[400];
    int mig = 0;
    nvml_return fault;

    REQUIRE_INIT();
    fault = begin_write();
    if (fault)
        return fault;
    read_instances();
    one = as_instance(handle);
    if (!one || id >= sizeof compute_slices / sizeof *compute_slices)
        return INVALID_ARGUMENT;
    profile = profile_of(one->profile);
    for (unsigned i = 0; i < MAX_GPUS * 8; i++) {
        if (!computes[i].used || computes[i].gpu != one->gpu || computes[i].instance != one->id)
            continue;
        taken += computes[i].slices;
        used_index[computes[i].id] = 1;
    }
    while (made.id < MAX_MIGS && used_index[made.id])
        made.id++;
    made.gpu = one->gpu;
    made.instance = one->id;
    made.slices = compute_slices[id];
    while (mig < MAX_MIGS && host.gpus[one->gpu].migs[mig].kind == MIG)
        mig++;
    if (taken + made.slices > profile->slices || mig == MAX_MIGS)
        return INSUFFICIENT_RESOURCES;
    snprintf(add, sizeof add,
             "computeinstance %d %u %u %u\n"
             "mig %d %d MIG-%x%x%x00000-51d2-5e0b-9f14-0b2a3c4d5e0f %u %u %u %u %llu\n"
             "miginstance %d %d %u %u %u\n",
             made.gpu, made.instance, made.id, made.slices, made.gpu, mig, (unsigned)made.gpu,
             made.instance, made.id, made.instance, made.id, profile->slices, made.slices,
             host.gpus[made.gpu].mem_mib * profile->size / 8, made.gpu, mig, one->start,
             profile->size, profile->id);
    rewrite((const char *const[]){NULL}, add);
    list_instance(made.gpu, made.instance, (int)made.id, 1);
    *out = compute_handle(&made);
    return end_write();
}

EXPORT nvml_return nvmlGpuInstanceGetComputeInstances(void *handle, unsigned id, void **out,
                                                      unsigned *count)
{
    const struct instance *one;
    unsigned n = 0;

    REQUIRE_INIT();
    read_instances();
    one = as_instance(handle);
    if (!one || id >= sizeof compute_slices / sizeof *compute_slices)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < MAX_GPUS * 8; i++)
        if (computes[i].used && computes[i].gpu == one->gpu && computes[i].instance == one->id &&
            computes[i].slices == compute_slices[id])
            out[n++] = compute_handle(&computes[i]);
    *count = n;
    return SUCCESS;
}

EXPORT nvml_return nvmlGpuInstanceGetComputeInstanceById(void *handle, unsigned id, void **out)
{
    const struct instance *one;

    REQUIRE_INIT();
    read_instances();
    one = as_instance(handle);
    for (unsigned i = 0; one && i < MAX_GPUS * 8; i++) {
        if (computes[i].used && computes[i].gpu == one->gpu && computes[i].instance == one->id &&
            computes[i].id == id) {
            *out = compute_handle(&computes[i]);
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

/* nvmlComputeInstanceInfo_t */
struct compute_info {
    void *device;
    void *instance;
    unsigned id;
    unsigned profile;
    unsigned start;
    unsigned size;
};

EXPORT nvml_return nvmlComputeInstanceGetInfo_v2(void *handle, struct compute_info *out)
{
    const struct compute *one;

    REQUIRE_INIT();
    read_instances();
    one = as_compute(handle);
    if (!one)
        return INVALID_ARGUMENT;
    *out = (struct compute_info){
        .device = &host.gpus[one->gpu],
        .instance = instance_handle(one->gpu, one->instance),
        .id = one->id,
        .size = one->slices,
    };
    return SUCCESS;
}

EXPORT nvml_return nvmlComputeInstanceDestroy(void *handle)
{
    const struct compute *one;
    char drop[64];
    char mig_drop[64] = "\001";
    char instance_drop[64] = "\001";
    nvml_return fault;

    REQUIRE_INIT();
    fault = begin_write();
    if (fault)
        return fault;
    read_instances();
    one = as_compute(handle);
    if (!one)
        return INVALID_ARGUMENT;
    if (is_busy(&host.gpus[one->gpu], (int)one->instance, (int)one->id))
        return IN_USE;
    snprintf(drop, sizeof drop, "computeinstance %d %u %u ", one->gpu, one->instance, one->id);
    for (int i = 0; i < MAX_MIGS; i++) {
        const struct mig *mig = &host.gpus[one->gpu].migs[i];

        if (mig->kind == MIG && mig->gpu_instance == (int)one->instance &&
            mig->compute_instance == (int)one->id) {
            snprintf(mig_drop, sizeof mig_drop, "mig %d %d ", one->gpu, i);
            snprintf(instance_drop, sizeof instance_drop, "miginstance %d %d ", one->gpu, i);
        }
    }
    list_instance(one->gpu, one->instance, (int)one->id, 0);
    rewrite((const char *const[]){drop, mig_drop, instance_drop, NULL}, "");
    return end_write();
}
