/* SPDX-License-Identifier: Apache-2.0
 *
 * The fake NVML, which also writes a byte to a file of the scenario each time it is loaded: how often the
 * driver is asked is not seen otherwise.
 */
#include "fakenvml.c"

#include <fcntl.h>

__attribute__((constructor)) static void count(void)
{
    int fd = open("/run/gpuruntime-test/asked", O_WRONLY | O_APPEND | O_CLOEXEC);

    if (fd >= 0 && write(fd, "x", 1) == 1)
        close(fd);
}
