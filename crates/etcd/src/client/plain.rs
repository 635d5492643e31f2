//! Requests over plain HTTP/1.0, without credentials. With HTTP/1.0, this module needs no HTTP client: there is no
//! chunked encoding, and the end of the connection ends the response.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::port::Error;

/// Maximum size of a response in bytes. etcd's metrics have about 100 KiB.
const MAX_RESPONSE: u64 = 1 << 20;

/// Sends a GET request, and returns the response with its headers. `deadline` includes the connection.
pub(super) async fn get(
    address: &str,
    path: &str,
    body: &str,
    deadline: Duration,
) -> Result<String, Error> {
    let read = async {
        let mut stream = TcpStream::connect(address).await?;
        let length = body.len();
        let request = format!(
            "GET {path} HTTP/1.0\r\nHost: {address}\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        let mut limited = stream.take(MAX_RESPONSE + 1);
        limited.read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    match timeout(deadline, read).await {
        Err(_) => Err(Error::Timeout(address.to_owned())),
        Ok(Err(error)) => Err(Error::Unreachable(format!("{address}: {error}"))),
        Ok(Ok(answer)) if answer.len() as u64 > MAX_RESPONSE => Err(Error::Other(format!(
            "{address}: the response is longer than that of an etcd member: check the address"
        ))),
        Ok(Ok(answer)) => Ok(String::from_utf8_lossy(&answer).into_owned()),
    }
}

/// The status code and the body of a response. `None` if the response is not HTTP.
pub(super) fn parts(answer: &str) -> Option<(u16, &str)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let code = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?;
    Some((code.parse().ok()?, body))
}

/// The value of a metric without labels, in the text format of Prometheus. The last line of a body may be incomplete, so
/// only lines with a line break are used.
pub(super) fn metric(body: &str, name: &str) -> Option<f64> {
    let lines = body.split_inclusive('\n');
    let mut found = lines.filter_map(|line| {
        let value = line.strip_suffix('\n')?.strip_prefix(name)?;
        value.strip_prefix(' ')
    });
    found.next()?.trim().parse().ok()
}
