/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest library worth reading; build.sh makes the files beside this one from it. */
int gpuruntime_tiny(void) { return 42; }
