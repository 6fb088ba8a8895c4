/* SPDX-License-Identifier: Apache-2.0
 *
 * Linked against libcuda.so.1: the loader has to find it before main runs.
 */
#include <stdio.h>

int cuInit(unsigned int flags);
int cuDriverGetVersion(int *version);

int main(void)
{
	int version = 0;
	int result = cuInit(0);

	if (result == 0)
		result = cuDriverGetVersion(&version);
	printf("needed %d %d\n", result, version);
	return 0;
}
