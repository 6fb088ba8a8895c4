/* SPDX-License-Identifier: Apache-2.0 */
/* What a program costs that does next to nothing, in a language without a runtime of its own. */
#include <stdio.h>

int main(void)
{
    return puts("hello, world") < 0;
}
