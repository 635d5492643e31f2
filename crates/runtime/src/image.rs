//! The operator's own image, which init containers run to prepare the data of a member before etcd starts.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use tokio::sync::OnceCell;

use api::problem::Chain;
use member::OperatorImage;

use crate::Operator;

/// The operator's own image. It is read from the operator's pod when it is first needed.
pub struct OwnImage {
    client: Client,
    namespace: String,
    pod: String,
    known: OnceCell<OperatorImage>,
}

impl OwnImage {
    /// Uses `image`, or the image of the operator's pod if `image` is `None`.
    pub fn new(operator: &Operator, image: Option<String>) -> Self {
        let known = image.map(|image| OperatorImage {
            image,
            pull_policy: None,
        });
        Self {
            client: operator.client.clone(),
            namespace: operator.namespace.clone(),
            pod: operator.identity.clone(),
            known: known.map_or_else(OnceCell::new, |image| OnceCell::new_with(Some(image))),
        }
    }

    /// Returns the image.
    ///
    /// # Errors
    /// Fails if the operator's pod cannot be read. The error contains the reason and the remedy.
    pub async fn get(&self) -> Result<&OperatorImage, String> {
        self.known.get_or_try_init(|| self.read()).await
    }

    async fn read(&self) -> Result<OperatorImage, String> {
        let Self { namespace, pod, .. } = self;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let found = pods.get(pod).await.map_err(|error| {
            let cause = Chain(&error).to_string();
            format!("cannot read the operator's own pod {namespace}/{pod} ({cause}): set --operator-image")
        })?;
        let containers = found.spec.map(|spec| spec.containers).unwrap_or_default();
        let container = containers.into_iter().next().unwrap_or_default();
        Ok(OperatorImage {
            image: container.image.unwrap_or_default(),
            pull_policy: container.image_pull_policy,
        })
    }
}
