/* SPDX-License-Identifier: Apache-2.0
 *
 * A weak hook: it keeps the environment that it was started with and lets the C library convert
 * text.  Then it leaves the file RAN.
 */
#include <fcntl.h>
#include <iconv.h>
#include <locale.h>
#include <unistd.h>

int main(void)
{
	int fd;

	setlocale(LC_ALL, "");
	(void)iconv_open("MARKED", "UTF-8");
	fd = open(RAN, O_CREAT | O_WRONLY, 0600);
	return fd < 0 || close(fd) != 0;
}
