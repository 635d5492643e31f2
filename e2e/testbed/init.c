/* The first process of a pod sandbox and of the testbed. It reaps orphans and
 * exits on SIGTERM and SIGINT. When it exits, the kernel kills all other
 * processes of its PID namespace. */
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
