/* SPDX-License-Identifier: Apache-2.0
 *
 * What a hostile image ships: a library that leaves a mark on the host when somebody loads it,
 * preloaded, as an auditor or as a character set.  MARK is a path of the host.
 */
#include <fcntl.h>
#include <unistd.h>

__attribute__((constructor)) static void leave_mark(void)
{
	int fd = open(MARK, O_CREAT | O_WRONLY, 0600);

	if (fd >= 0)
		close(fd);
}

unsigned la_version(unsigned version)
{
	return version;
}

int gconv_init(void *step)
{
	(void)step;
	return 1;
}

int gconv(void)
{
	return 1;
}
