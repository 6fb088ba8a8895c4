/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the fake NVML share: the simulated host as fakenvml_conf.c reads it, and the
 * checks that each entry point begins with.  Values and layouts are those of the public nvml.h.
 */
#ifndef FAKENVML_H
#define FAKENVML_H

typedef int nvml_return;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    UNKNOWN = 999,
};

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 64
#define MAX_MIGS 7
#define NAME_BYTES 512
#define MAX_FAILURES 32
#define MAX_XIDS 256
#define MAX_VALUES 1024
#define MAX_PROCESSES 256
/* "No GPU instance" and "no compute instance" in an event or a process. */
#define NO_INSTANCE 0xffffffffU

/* First member of what a handle points to: tells the kinds of handle apart. */
enum kind { NONE, GPU, MIG };

struct gpu;

/* nvmlDeviceAttributes_t: what the GPU instance of a MIG device has. */
struct attributes {
    unsigned multiprocessors;
    unsigned copy_engines;
    unsigned decoders;
    unsigned encoders;
    unsigned jpegs;
    unsigned ofas;
    unsigned gpu_slices;
    unsigned compute_slices;
    unsigned long long mem_mib;
};

struct mig {
    enum kind kind;
    int index;
    int gpu_instance;
    int compute_instance;
    int lost;
    unsigned profile; /* the id of the GPU instance's profile, as the driver numbers them */
    unsigned start;   /* its first memory slice, and the number of its memory slices */
    unsigned size;
    struct attributes attributes;
    char uuid[NAME_BYTES];
    struct gpu *parent;
};

struct gpu {
    enum kind kind;
    int index;
    int minor;
    int mig_mode;
    int mig_pending;
    int mig_reset; /* a change of the MIG mode waits for a reset */
    int lost;
    int nobusid;
    int arch_major;
    int arch_minor;
    unsigned brand;
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned device_id;
    unsigned subsystem_id;
    unsigned compute_mode;
    unsigned has_fabric;
    int fabric_state; /* nvmlGpuFabricState_t, -1 for the usual one */
    int fabric_status;
    int addressing; /* nvmlDeviceAddressingModeType_t, 0 if NVML does not support the question */
    int memory_node; /* -1 for none */
    unsigned clique;
    unsigned char cluster[16];
    unsigned switch_links;
    unsigned char links[MAX_GPUS];    /* active NVLinks to that GPU */
    unsigned char topology[MAX_GPUS]; /* nvmlGpuTopologyLevel_t */
    double reset_time;                /* of the boot clock: since when its counters count */
    unsigned long long mem_mib;
    char uuid[NAME_BYTES];
    char name[NAME_BYTES];
    struct mig migs[MAX_MIGS];
};

/* nvmlPciInfo_t */
struct pci_info {
    char bus_id_legacy[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pci_device_id;
    unsigned pci_subsystem_id;
    char bus_id[32];
};

/* A function that fails, or hangs: for the GPU of that index, or for all if it is -1. */
struct failure {
    char function[64];
    int code;
    int hangs;
    int gpu;
};

/* An XID; gpu is -1 for one of a device that is not listed. */
struct xid {
    double time; /* of the real-time clock */
    int gpu;
    unsigned code;
    unsigned gpu_instance;
    unsigned compute_instance;
};

/* A measurement of a GPU, or of the MIG device *mig* if that is not -1. */
struct value {
    int gpu;
    int mig;
    char name[32];
    double number;
};

struct process {
    int gpu;
    unsigned pid;
    unsigned long long mem_mib;
    unsigned gpu_instance;
    unsigned compute_instance;
};

struct host {
    struct gpu gpus[MAX_GPUS];
    struct failure failures[MAX_FAILURES];
    struct xid xids[MAX_XIDS];
    struct value values[MAX_VALUES];
    struct process processes[MAX_PROCESSES];
    int failure_count;
    int gpu_count;
    int xid_count;
    int value_count;
    int process_count;
    int cuda;
    int absent; /* no driver is loaded */
    int init_fails;
    int init_hangs;
    unsigned delay_us;
    double next_change; /* of the real-time clock: when another line holds, or one no longer */
    char driver[80];
    char nvml[80];
};

extern struct host host;
extern int references;

/* fakenvml_conf.c */

/* The path of fakenvml.conf. */
const char *conf_path(void);
/* Read the file again if it has changed, or if other lines hold now. */
void refresh(void);
/* Sleep without a break, as a driver that hangs does, until the file may say something else; the
 * first call with *changes at -1 begins to watch the file. */
void sleep_until_change(int *changes);
/* The seconds of the real-time clock. */
double now(void);

/* fakenvml.c */

/* The GPU that *handle* stands for, itself or as parent of a MIG device; NULL for neither. */
struct gpu *gpu_behind(void *handle);
/* The MIG device that *handle* stands for, NULL for another. */
struct mig *as_mig(void *handle);
/* The code with which *function* fails for *gpu*, NULL for none; returns late if it hangs. */
nvml_return failure_of(const char *function, const struct gpu *gpu);
/* What *function*, which asks about a device, checks first. */
nvml_return usable(const char *function, void *handle);
nvml_return initialised(const char *function);
void write_pci_info(const struct gpu *gpu, struct pci_info *out);

/* Every entry point holds the lock until it returns: callers may have several threads. */
int take_lock(void);
void drop_lock(const int *taken);
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define LOCK() \
    __attribute__((cleanup(drop_lock), unused)) const int JOIN(lock_, __LINE__) = take_lock()

#define REQUIRE_(check)                                           \
    LOCK();                                                       \
    do {                                                          \
        nvml_return checked_ = check;                             \
        if (checked_ != SUCCESS)                                  \
            return checked_;                                      \
    } while (0)

#define REQUIRE(handle) REQUIRE_(usable(__func__, handle))
#define REQUIRE_INIT() REQUIRE_(initialised(__func__))

/*
 * An older version of a function, the same here.  An alias and no call: where the newer one is
 * made to be missing, the older must still be there.
 */
#define OLDER(name, newer, ...) EXPORT nvml_return name(__VA_ARGS__) __attribute__((alias(#newer)))

#endif
