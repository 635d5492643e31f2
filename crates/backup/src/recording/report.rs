//! The report of the agent, which the operator reads over TCP. The agent reads nothing from its clients. The operator
//! reads a limited number of bytes. It displays the report, and makes no decision with it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use continuous::{Monitor, Progress};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use store::progress::PORT;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

/// Time limit for one connection.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum length of a report in bytes. A report with ten gaps has about 2,500 bytes.
const MAX_REPORT: u64 = 16 << 10;
/// Pause after the port could not be opened, or a client could not be accepted.
const RETRY: Duration = Duration::from_secs(1);

/// The progress of the agent, and the time of its clock. All times in the progress are times of this clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReport {
    /// The time of the report in microseconds since the epoch.
    pub now: i64,
    /// The progress.
    pub progress: Progress,
}

/// Sends the report to each client that connects. Never completes.
pub(super) async fn serve(monitor: Monitor) {
    let everywhere = [
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT)),
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)),
    ];
    loop {
        match TcpListener::bind(&everywhere[..]).await {
            Ok(listener) => serve_at(&listener, &monitor).await,
            Err(error) => tracing::debug!(%error, "cannot listen on the port for reports"),
        }
        sleep(RETRY).await;
    }
}

async fn serve_at(listener: &TcpListener, monitor: &Monitor) {
    loop {
        match listener.accept().await {
            Ok((mut stream, _)) => {
                let report = AgentReport {
                    now: Timestamp::now().as_microsecond(),
                    progress: monitor.read(),
                };
                let text = serde_json::to_vec(&report).unwrap_or_default();
                // The write has a timeout, because a client that does not read must not block the server.
                let _ = timeout(TIMEOUT, stream.write_all(&text)).await;
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept a client");
                sleep(RETRY).await;
            }
        }
    }
}

/// Reads the report of the agent at this address. `None` if no valid report arrives in time.
pub async fn read(address: IpAddr) -> Option<AgentReport> {
    read_at(SocketAddr::from((address, PORT))).await
}

async fn read_at(address: SocketAddr) -> Option<AgentReport> {
    let request = async {
        let stream = TcpStream::connect(address).await.ok()?;
        let mut text = Vec::new();
        stream.take(MAX_REPORT).read_to_end(&mut text).await.ok()?;
        serde_json::from_slice(&text).ok()
    };
    timeout(TIMEOUT, request).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_client_gets_the_report() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let monitor = Monitor::default();
        let server = tokio::spawn(async move { serve_at(&listener, &monitor).await });
        // The client `_silent` neither sends nor reads, and must not block other clients.
        let _silent = TcpStream::connect(address).await.unwrap();
        let report = read_at(address).await.unwrap();
        assert_eq!(report.progress, Progress::default());
        assert!(report.now > 1_700_000_000_000_000, "{report:?}");
        server.abort();
    }

    #[tokio::test]
    async fn invalid_report_of_agent_is_ignored() {
        for text in ["", "7 9\n", "{}", "{\"now\":\"x\",\"progress\":{}}"] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let server = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(text.as_bytes()).await.unwrap();
                drop(stream);
            };
            let (found, ()) = tokio::join!(read_at(address), server);
            assert_eq!(found, None, "{text}");
        }
    }
}
