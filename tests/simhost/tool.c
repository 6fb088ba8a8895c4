/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A driver program of the simulated host that no test calls: says who it is and ends.
 * The build defines TOOL_NAME.
 */
#include <stdio.h>

int main(void)
{
    puts(TOOL_NAME ": simulated");
    return 0;
}
