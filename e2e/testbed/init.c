/* The first process of a pod's sandbox, and of the testbed itself: it waits,
 * takes the exit codes of orphans, and ends when asked to. When it ends, the
 * kernel ends everything else in its process namespace. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void on_signal(int number)
{
	if (number != SIGCHLD)
		_exit(0);
	while (waitpid(-1, 0, WNOHANG) > 0)
		;
}

int main(void)
{
	signal(SIGTERM, on_signal);
	signal(SIGINT, on_signal);
	signal(SIGCHLD, on_signal);
	for (;;)
		pause();
}
