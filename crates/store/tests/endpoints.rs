//! Requests to a wrong endpoint fail. If only the scheme of the URL is wrong, the error names the remedy.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpListener;

use store::testing::{AzureServer, GoogleServer, S3Server};
use store::{AbsConfig, AbsStore, GcsConfig, GcsStore, S3Config, S3Store, Store};

/// Starts a server that sends the same response to every request. Returns its address without a scheme.
fn web_server(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(answer.as_bytes());
            });
        }
    });
    format!("127.0.0.1:{}", address.port())
}

/// The configurations of the clients. A test replaces the endpoint. With `https`, the S3 client does not verify the
/// certificate.
struct Configs(S3Config, GcsConfig, AbsConfig);

impl Configs {
    fn new() -> Self {
        Self(
            S3Server::start(&["bucket"]).config("bucket"),
            GoogleServer::start(&[]).config("bucket"),
            AzureServer::start(&["bucket"]).config("bucket"),
        )
    }

    async fn stores(&self, endpoint: &str) -> Vec<(&'static str, Box<dyn Store>)> {
        let s3 = S3Config {
            endpoint: Some(endpoint.to_owned()),
            insecure_skip_verify: endpoint.starts_with("https"),
            ..self.0.clone()
        };
        let google = GcsConfig {
            endpoint: Some(endpoint.to_owned()),
            ..self.1.clone()
        };
        let azure = AbsConfig {
            endpoint: Some(endpoint.to_owned()),
            ..self.2.clone()
        };
        vec![
            ("S3", Box::new(S3Store::new(s3).await.unwrap())),
            ("Google", Box::new(GcsStore::new(google).await.unwrap())),
            ("Azure", Box::new(AbsStore::new(&azure).unwrap())),
        ]
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_wrong_store_endpoint_fail() {
    let configs = Configs::new();
    let plain = web_server("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
    for (name, store) in configs.stores(&format!("https://{plain}")).await {
        let error = store.list("key").await.unwrap_err().to_string();
        assert!(error.contains("use a URL with http://"), "{name}: {error}");
        assert!(!error.contains("caSecret"), "{name}: {error}");
    }
    // The first answer comes from a TLS server that receives plain HTTP. The other answers come from web servers.
    for answer in [
        "HTTP/1.1 400 Bad Request\r\ncontent-length: 48\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
        "HTTP/1.1 301 Moved Permanently\r\nlocation: https://elsewhere/\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 13\r\n\r\n<html></html>",
    ] {
        let server = web_server(answer);
        for (name, store) in configs.stores(&format!("http://{server}")).await {
            let error = store.list("key").await.unwrap_err().to_string();
            assert!(error.contains("https://"), "{name}: {error}");
            assert!(error.contains("endpoint"), "{name}: {error}");
        }
    }

    // The server responds with a web page, like a proxy that blocks requests.
    let page = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 26\r\n\r\n<html><p>Welcome</p></html";
    let server = web_server(page);
    for (name, store) in configs.stores(&format!("http://{server}")).await {
        assert!(store.list("key").await.is_err(), "{name}");
        let mut upload = store.begin("key").await.unwrap();
        upload.write("content".into()).await.unwrap();
        assert!(upload.commit().await.is_err(), "{name}");
    }
}
