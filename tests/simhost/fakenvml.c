/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated host's libnvidia-ml.so.1: the NVML entry points that device discovery and the
 * services of a node need, answered from a text file.  Written from the public NVML API
 * documentation.
 *
 * The file is the one that $FAKENVML_CONF names, else fakenvml.conf beside this library (links
 * followed).  It is read at each first nvmlInit, and again at the next call when it has changed.
 * No file means no driver.  docs/development/simulated-host.md has its lines.
 *
 * This file has the entry points about the library, its handles and what a device is;
 * fakenvml_node.c those about links, fabric, events and measurements; fakenvml_mig.c those about
 * MIG.  A function can be made to be missing altogether: see symbols.py.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fakenvml.h"

int references;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

int take_lock(void)
{
    pthread_mutex_lock(&lock);
    return 1;
}

void drop_lock(const int *taken)
{
    (void)taken;
    pthread_mutex_unlock(&lock);
}

static nvml_return put(char *to, unsigned size, const char *text)
{
    if (!to)
        return INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* The GPU that *handle* stands for, itself or as parent of a MIG device; NULL for neither. */
struct gpu *gpu_behind(void *handle)
{
    if (!handle)
        return NULL;
    if (*(enum kind *)handle == GPU)
        return handle;
    if (*(enum kind *)handle == MIG)
        return ((struct mig *)handle)->parent;
    return NULL;
}

struct mig *as_mig(void *handle)
{
    if (handle && *(enum kind *)handle == MIG)
        return handle;
    return NULL;
}

static const struct failure *failure_for(const char *function, const struct gpu *gpu)
{
    for (int i = 0; i < host.failure_count; i++) {
        const struct failure *failure = &host.failures[i];

        if (strcmp(failure->function, function) == 0 &&
            (failure->gpu == -1 || (gpu && failure->gpu == gpu->index)))
            return failure;
    }
    return NULL;
}

nvml_return failure_of(const char *function, const struct gpu *gpu)
{
    const struct failure *failure;
    int changes = -1;

    while ((failure = failure_for(function, gpu)) && failure->hangs)
        sleep_until_change(&changes);
    if (changes >= 0)
        close(changes);
    return failure ? failure->code : SUCCESS;
}

nvml_return initialised(const char *function)
{
    if (references == 0)
        return UNINITIALIZED;
    refresh();
    return host.absent ? DRIVER_NOT_LOADED : failure_of(function, NULL);
}

nvml_return usable(const char *function, void *handle)
{
    struct gpu *gpu;
    struct mig *mig;

    if (references == 0)
        return UNINITIALIZED;
    refresh();
    if (host.absent)
        return DRIVER_NOT_LOADED;
    gpu = gpu_behind(handle);
    if (!gpu)
        return INVALID_ARGUMENT;
    mig = as_mig(handle);
    if (gpu->lost || (mig && mig->lost))
        return GPU_IS_LOST;
    return failure_of(function, gpu);
}

/* start and stop */

static nvml_return start(void)
{
    int changes = -1;

    LOCK();
    if (references > 0) {
        references++;
        return SUCCESS;
    }
    refresh();
    while (host.init_hangs)
        sleep_until_change(&changes);
    if (changes >= 0)
        close(changes);
    if (host.absent)
        return DRIVER_NOT_LOADED;
    if (host.delay_us > 0)
        usleep(host.delay_us);
    if (host.init_fails)
        return host.init_fails;
    references = 1;
    return SUCCESS;
}

EXPORT nvml_return nvmlInit_v2(void)
{
    return start();
}

OLDER(nvmlInit, nvmlInit_v2, void);

EXPORT nvml_return nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return start();
}

EXPORT nvml_return nvmlShutdown(void)
{
    REQUIRE_INIT();
    references--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(nvml_return code)
{
    switch (code) {
    case SUCCESS:
        return "Success";
    case UNINITIALIZED:
        return "Uninitialized";
    case INVALID_ARGUMENT:
        return "Invalid Argument";
    case NOT_SUPPORTED:
        return "Not Supported";
    case NO_PERMISSION:
        return "Insufficient Permissions";
    case NOT_FOUND:
        return "Not Found";
    case INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case TIMEOUT:
        return "Timeout";
    case FUNCTION_NOT_FOUND:
        return "Function Not Found";
    case GPU_IS_LOST:
        return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH:
        return "Driver/library version mismatch";
    default:
        return "Unknown Error";
    }
}

/* the system */

EXPORT nvml_return nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    REQUIRE_INIT();
    return put(text, size, host.driver);
}

EXPORT nvml_return nvmlSystemGetNVMLVersion(char *text, unsigned size)
{
    REQUIRE_INIT();
    return put(text, size, host.nvml);
}

EXPORT nvml_return nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    REQUIRE_INIT();
    *version = host.cuda;
    return SUCCESS;
}

OLDER(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2, int *version);

/* handles */

EXPORT nvml_return nvmlDeviceGetCount_v2(unsigned *count)
{
    REQUIRE_INIT();
    *count = host.gpu_count;
    return SUCCESS;
}

OLDER(nvmlDeviceGetCount, nvmlDeviceGetCount_v2, unsigned *count);

EXPORT nvml_return nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    REQUIRE_INIT();
    if (index >= (unsigned)host.gpu_count)
        return INVALID_ARGUMENT;
    REQUIRE(&host.gpus[index]);
    *handle = &host.gpus[index];
    return SUCCESS;
}

OLDER(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2, unsigned index, void **handle);

static void *find_uuid(const char *uuid)
{
    for (int i = 0; i < host.gpu_count; i++) {
        struct gpu *gpu = &host.gpus[i];

        if (strcmp(gpu->uuid, uuid) == 0)
            return gpu;
        for (int j = 0; j < MAX_MIGS; j++) {
            if (gpu->migs[j].kind == MIG && strcmp(gpu->migs[j].uuid, uuid) == 0)
                return &gpu->migs[j];
        }
    }
    return NULL;
}

EXPORT nvml_return nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    void *found;

    REQUIRE_INIT();
    found = find_uuid(uuid);
    if (!found)
        return NOT_FOUND;
    REQUIRE(found);
    *handle = found;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **handle)
{
    unsigned domain;
    unsigned bus;
    unsigned device;

    REQUIRE_INIT();
    if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &device) != 3)
        return INVALID_ARGUMENT;
    for (int i = 0; i < host.gpu_count; i++) {
        struct gpu *gpu = &host.gpus[i];

        if (gpu->domain == domain && gpu->bus == bus && gpu->device == device) {
            REQUIRE(gpu);
            *handle = gpu;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

/* one device */

EXPORT nvml_return nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    struct mig *mig = as_mig(handle);

    REQUIRE(handle);
    return put(text, size, mig ? mig->uuid : gpu_behind(handle)->uuid);
}

EXPORT nvml_return nvmlDeviceGetName(void *handle, char *text, unsigned size)
{
    REQUIRE(handle);
    return put(text, size, gpu_behind(handle)->name);
}

EXPORT nvml_return nvmlDeviceGetIndex(void *handle, unsigned *index)
{
    struct mig *mig = as_mig(handle);

    REQUIRE(handle);
    *index = mig ? mig->index : gpu_behind(handle)->index;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMinorNumber(void *handle, unsigned *minor)
{
    REQUIRE(handle);
    if (as_mig(handle))
        return INVALID_ARGUMENT;
    *minor = gpu_behind(handle)->minor;
    return SUCCESS;
}

static void write_legacy_bus_id(const struct gpu *gpu, struct pci_info *out)
{
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0",
             gpu->domain & 0xffff, gpu->bus & 0xff, gpu->device & 0x1f);
}

void write_pci_info(const struct gpu *gpu, struct pci_info *out)
{
    memset(out, 0, sizeof *out);
    out->domain = gpu->domain;
    out->bus = gpu->bus;
    out->device = gpu->device;
    out->pci_device_id = gpu->device_id;
    out->pci_subsystem_id = gpu->subsystem_id;
    if (gpu->nobusid)
        return;
    write_legacy_bus_id(gpu, out);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus & 0xff,
             gpu->device & 0x1f);
}

EXPORT nvml_return nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *out)
{
    REQUIRE(handle);
    write_pci_info(gpu_behind(handle), out);
    return SUCCESS;
}

/* Older versions end before the long bus id. */
EXPORT nvml_return nvmlDeviceGetPciInfo_v2(void *handle, struct pci_info *out)
{
    struct gpu *gpu;

    REQUIRE(handle);
    gpu = gpu_behind(handle);
    memset(out, 0, offsetof(struct pci_info, bus_id));
    out->domain = gpu->domain;
    out->bus = gpu->bus;
    out->device = gpu->device;
    if (!gpu->nobusid)
        write_legacy_bus_id(gpu, out);
    return SUCCESS;
}

OLDER(nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v2, void *handle, struct pci_info *out);

EXPORT nvml_return nvmlDeviceGetBrand(void *handle, unsigned *brand)
{
    REQUIRE(handle);
    *brand = gpu_behind(handle)->brand;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetArchitecture(void *handle, unsigned *architecture)
{
    REQUIRE(handle);
    *architecture = gpu_behind(handle)->arch_major; /* 9: NVML_DEVICE_ARCH_HOPPER */
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    REQUIRE(handle);
    *major = gpu_behind(handle)->arch_major;
    *minor = gpu_behind(handle)->arch_minor;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetVirtualizationMode(void *handle, unsigned *mode)
{
    REQUIRE(handle);
    *mode = 0; /* none */
    return SUCCESS;
}
