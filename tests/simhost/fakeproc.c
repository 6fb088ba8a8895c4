/* SPDX-License-Identifier: Apache-2.0 */
/*
 * createRuntime hook that shows this mount namespace's /proc/driver at the container's /proc/driver.
 * With a kernel driver every procfs shows it; the simulated one is a mount, and runc refuses mounts
 * inside /proc from config.json.  OCI config.md "createRuntime": runs in the runtime's namespaces,
 * after the container's mounts are made and before pivot_root.
 *
 * Arguments: [SOURCE].  Reads the OCI state on stdin.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OPEN_TREE_CLONE_FLAG 1
#define MOVE_MOUNT_FROM_EMPTY_PATH 4

static char document[4 << 20];

static void read_all(FILE *file)
{
    size_t length = fread(document, 1, sizeof document - 1, file);

    document[length] = '\0';
}

/* Just behind `"key":` and white space, from *from* on; NULL if the key does not occur. */
static const char *value_of(const char *from, const char *key)
{
    char quoted[64];
    const char *at;

    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    for (at = strstr(from, quoted); at; at = strstr(at + 1, quoted)) {
        const char *behind = at + strlen(quoted);

        behind += strspn(behind, " \t\r\n");
        if (*behind == ':') {
            behind++;
            return behind + strspn(behind, " \t\r\n");
        }
    }
    return NULL;
}

static int copy_string(const char *value, char *to, size_t size)
{
    size_t length;

    if (!value || *value != '"')
        return 0;
    value++;
    length = strcspn(value, "\"");
    if (length >= size)
        return 0;
    memcpy(to, value, length);
    to[length] = '\0';
    return 1;
}

static int die(const char *what)
{
    perror(what);
    return 1;
}

int main(int argc, char **argv)
{
    const char *source = argc > 1 ? argv[1] : "/proc/driver";
    const char *pid;
    const char *root;
    char bundle[4096];
    char rootfs[4096];
    char path[9000];
    FILE *config;
    int namespace_fd;
    int tree_fd;

    read_all(stdin);
    pid = value_of(document, "pid");
    if (!pid || !copy_string(value_of(document, "bundle"), bundle, sizeof bundle)) {
        fprintf(stderr, "fakeproc: no pid or bundle in the state\n");
        return 1;
    }
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", atoi(pid));
    namespace_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (namespace_fd < 0)
        return die(path);

    snprintf(path, sizeof path, "%s/config.json", bundle);
    config = fopen(path, "re");
    if (!config)
        return die(path);
    read_all(config);
    root = value_of(document, "root");
    if (!root || !copy_string(value_of(root, "path"), rootfs, sizeof rootfs)) {
        fprintf(stderr, "fakeproc: no root.path in the config\n");
        return 1;
    }
    if (rootfs[0] == '/')
        snprintf(path, sizeof path, "%s/proc/driver", rootfs);
    else
        snprintf(path, sizeof path, "%s/%s/proc/driver", bundle, rootfs);

    tree_fd = syscall(SYS_open_tree, AT_FDCWD, source,
                      OPEN_TREE_CLONE_FLAG | O_CLOEXEC | AT_RECURSIVE);
    if (tree_fd < 0)
        return die(source);
    if (setns(namespace_fd, CLONE_NEWNS))
        return die("setns");
    if (syscall(SYS_move_mount, tree_fd, "", AT_FDCWD, path, MOVE_MOUNT_FROM_EMPTY_PATH))
        return die(path);
    return 0;
}
