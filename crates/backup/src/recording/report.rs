//! The report of the agent, which the operator reads over TCP. The agent reads nothing from its clients. The operator
//! reads a limited number of bytes. The operator only displays the report, and bases no decision on it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use continuous::{Monitor, Progress};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use store::progress::{self, PORT};
use tokio::time::sleep;

/// Maximum length of a report in bytes. A report with ten gaps has about 2,500 bytes.
const MAX_REPORT: u64 = 16 << 10;
/// Pause between two attempts to open the port.
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
    loop {
        progress::serve_report(|| encoded(&monitor)).await;
        sleep(RETRY).await;
    }
}

fn encoded(monitor: &Monitor) -> Vec<u8> {
    let report = AgentReport {
        now: Timestamp::now().as_microsecond(),
        progress: monitor.read(),
    };
    serde_json::to_vec(&report).unwrap_or_default()
}

/// Reads the report of the agent at this address. `None` if no valid report arrives in time.
pub async fn read(address: IpAddr) -> Option<AgentReport> {
    read_at(SocketAddr::from((address, PORT))).await
}

async fn read_at(address: SocketAddr) -> Option<AgentReport> {
    let text = progress::read_report(address, MAX_REPORT).await?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn silent_client_does_not_block_report_of_agent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let monitor = Monitor::default();
        let server = tokio::spawn(progress::serve_at(listener, move || encoded(&monitor)));
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
