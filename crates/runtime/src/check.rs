//! The command `check` for `helm test`. It checks that running operators are ready, and changes nothing. The operator
//! has this command, because its image contains no shell and no HTTP client.

use std::time::Duration;

use api::problem::Chain;
use clap::Args;
use http::Uri;
use kube::Config;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{error, info};

use crate::client::sending_once;

/// Time limit of the command. The command retries until then, because connections to a new Service fail until the
/// kube-proxies have observed its endpoints.
const PATIENCE: Duration = Duration::from_mins(1);
const RETRY: Duration = Duration::from_secs(1);

/// The operators to check.
#[derive(Args, Clone, Debug)]
pub struct Check {
    /// Address of an operator, such as http://etcd-operator-metrics.etcd.svc:8080; the command reads its /readyz
    #[arg(required = true, value_name = "URL")]
    pub urls: Vec<Uri>,
}

/// Returns true if all operators report within a minute that they are ready. Logs the result for each operator.
pub async fn run(check: &Check) -> bool {
    let deadline = Instant::now() + PATIENCE;
    let mut ready = true;
    for url in &check.urls {
        match until_ready(url, deadline).await {
            Ok(()) => info!("{url} is ready"),
            Err(cause) => {
                error!("{url} is not ready: {cause}");
                ready = false;
            }
        }
    }
    ready
}

/// Waits until an operator reports that it is ready. The error is the last response of the operator before the
/// deadline, or why there was none.
async fn until_ready(url: &Uri, deadline: Instant) -> Result<(), String> {
    let mut last = String::from("no answer");
    loop {
        match timeout_at(deadline, get(url)).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(kube::Error::Api(answer))) => last = answer.message,
            Ok(Err(error)) => last = Chain(&error).to_string(),
            Err(_) => return Err(last),
        }
        if timeout_at(deadline, sleep(RETRY)).await.is_err() {
            return Err(last);
        }
    }
}

/// Sends a request with the client for the Kubernetes API, because this client supports plain HTTP.
async fn get(url: &Uri) -> Result<String, kube::Error> {
    let mut config = Config::new(url.clone());
    // With an empty `root_cert`, the client loads no CA certificates. Plain HTTP needs none, and the image may contain
    // none.
    config.root_cert = Some(Vec::new());
    let request = http::Request::get("/readyz").body(Vec::new());
    let request = request.map_err(kube::Error::HttpError)?;
    sending_once(config)?.request_text(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;

    use crate::admin::{Admin, Readiness, bind, serve};

    async fn operator() -> (Uri, Readiness) {
        let readiness = Readiness::default();
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let admin = Admin {
            readiness: readiness.clone(),
            registry: Arc::default(),
        };
        tokio::spawn(serve(listener, admin));
        (format!("http://{address}").parse().unwrap(), readiness)
    }

    #[tokio::test]
    async fn check_succeeds_if_all_operators_are_ready() {
        let ((first, one), (second, two)) = (operator().await, operator().await);
        one.ready();
        two.ready();
        let urls = vec![first, second];
        assert!(run(&Check { urls }).await);
    }

    #[tokio::test]
    async fn check_reports_response_of_unready_operator() {
        let (url, readiness) = operator().await;
        readiness.waiting_for("the CRD etcdclusters");
        let soon = Instant::now() + Duration::from_millis(300);
        let error = until_ready(&url, soon).await.unwrap_err();
        assert_eq!(error, "waiting for the CRD etcdclusters");
    }

    #[tokio::test]
    async fn check_waits_until_the_operator_is_ready() {
        let (url, readiness) = operator().await;
        tokio::spawn(async move {
            sleep(Duration::from_millis(200)).await;
            readiness.ready();
        });
        let later = Instant::now() + PATIENCE;
        assert_eq!(until_ready(&url, later).await, Ok(()));
    }
}
