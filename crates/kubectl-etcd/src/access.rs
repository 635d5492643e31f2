//! Access to Kubernetes with the kubeconfig of kubectl, and the requests that several commands share.

use std::fmt::Debug;

use api::names;
use api::{EtcdBackup, EtcdCluster, EtcdRestore};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cli::Connection;
use crate::error::{Error, Result};

/// Field manager of all changes that the plugin makes in Kubernetes.
pub const MANAGER: &str = "kubectl-etcd";

/// A client for Kubernetes, and the namespace that the command works in.
#[derive(Clone)]
pub struct Access {
    /// The client for the API server.
    pub client: Client,
    /// The namespace that the command works in.
    pub namespace: String,
}

/// Converts the error of a request to the API server.
fn failed(verb: &'static str, object: String) -> impl FnOnce(kube::Error) -> Error {
    move |source| Error::Request {
        verb,
        object,
        source: Box::new(source),
    }
}

impl Access {
    /// Reads the kubeconfig and builds a client. Sends no request.
    ///
    /// # Errors
    /// Fails if the kubeconfig is missing or invalid.
    pub async fn connect(connection: &Connection) -> Result<Self> {
        let options = KubeConfigOptions {
            context: connection.context.clone(),
            ..KubeConfigOptions::default()
        };
        let config = match &connection.kubeconfig {
            Some(path) => {
                let kubeconfig = Kubeconfig::read_from(path).map_err(Error::Kubeconfig)?;
                Config::from_custom_kubeconfig(kubeconfig, &options).await
            }
            None => Config::from_kubeconfig(&options).await,
        };
        let config = config.map_err(Error::Kubeconfig)?;
        let namespace = connection.namespace.clone();
        Ok(Self {
            namespace: namespace.unwrap_or_else(|| config.default_namespace.clone()),
            client: Client::try_from(config).map_err(Error::Client)?,
        })
    }

    /// The client for one kind in the command's namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns a copy of this client for another namespace.
    #[must_use]
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Self {
            client: self.client.clone(),
            namespace: namespace.to_owned(),
        }
    }

    /// The name of an object as messages show it, such as `etcdcluster/main in namespace prod`.
    pub fn named<K: Resource<DynamicType = ()>>(&self, name: &str) -> String {
        let kind = K::kind(&()).to_lowercase();
        format!("{kind}/{name} in namespace {}", self.namespace)
    }

    fn all_of<K: Resource<DynamicType = ()>>(&self) -> String {
        format!("{} in namespace {}", K::plural(&()), self.namespace)
    }

    /// Reads the object `name` in the command's namespace.
    ///
    /// # Errors
    /// Fails if the object does not exist or cannot be read.
    pub async fn get<K>(&self, name: &str) -> Result<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let answer = self.api::<K>().get(name).await;
        answer.map_err(failed("get", self.named::<K>(name)))
    }

    /// Reads the object `name` in the command's namespace. Returns `None` if it does not exist.
    ///
    /// # Errors
    /// Fails if the object cannot be read.
    pub async fn find<K>(&self, name: &str) -> Result<Option<K>>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let answer = self.api::<K>().get_opt(name).await;
        answer.map_err(failed("get", self.named::<K>(name)))
    }

    /// Lists the objects in the command's namespace that match the label selector.
    ///
    /// # Errors
    /// Fails if the list cannot be read.
    pub async fn list<K>(&self, selector: &str) -> Result<Vec<K>>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let params = ListParams::default().labels(selector);
        let answer = self.api::<K>().list(&params).await;
        let list = answer.map_err(failed("list", self.all_of::<K>()))?;
        Ok(list.items)
    }

    /// Reads the EtcdCluster `name`.
    ///
    /// # Errors
    /// Fails like [`Access::get`].
    pub async fn cluster(&self, name: &str) -> Result<EtcdCluster> {
        self.get(name).await
    }

    /// Lists the pods of a cluster's members, sorted by name.
    ///
    /// # Errors
    /// Fails like [`Access::list`].
    pub async fn pods(&self, cluster: &str) -> Result<Vec<Pod>> {
        let mut pods: Vec<Pod> = self.list(&names::cluster_selector(cluster)).await?;
        pods.sort_by_key(ResourceExt::name_any);
        Ok(pods)
    }

    /// Lists all EtcdBackups in the command's namespace.
    ///
    /// # Errors
    /// Fails like [`Access::list`].
    pub async fn backups(&self) -> Result<Vec<EtcdBackup>> {
        self.list("").await
    }

    /// Lists all EtcdRestores in the command's namespace.
    ///
    /// # Errors
    /// Fails like [`Access::list`].
    pub async fn restores(&self) -> Result<Vec<EtcdRestore>> {
        self.list("").await
    }

    /// Changes the object `name` with a merge patch, and returns the changed object.
    ///
    /// # Errors
    /// Fails if the API server rejects the patch.
    pub async fn merge<K>(&self, name: &str, patch: &Value) -> Result<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let params = PatchParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let answer = self
            .api::<K>()
            .patch(name, &params, &Patch::Merge(patch))
            .await;
        answer.map_err(failed("patch", self.named::<K>(name)))
    }

    /// Checks a manifest with a dry run of the API server. Creates nothing. Unknown fields are errors.
    ///
    /// # Errors
    /// Fails if the API server rejects the object.
    pub async fn check<K>(&self, name: &str, manifest: &Value) -> Result<()>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        // The request is built by hand, because kube's `PostParams` has no field for `fieldValidation`.
        let request = http::Request::post(format!(
            "{}?dryRun=All&fieldManager={MANAGER}&fieldValidation=Strict",
            self.api::<K>().resource_url()
        ));
        let request = request.header(http::header::CONTENT_TYPE, "application/json");
        let answer = match request.body(manifest.to_string().into_bytes()) {
            Ok(request) => self.client.request::<K>(request).await,
            Err(error) => Err(kube::Error::HttpError(error)),
        };
        answer
            .map(drop)
            .map_err(failed("create", self.named::<K>(name)))
    }

    /// Creates the object, and returns it as the API server stored it.
    ///
    /// # Errors
    /// Fails if the API server rejects the object.
    pub async fn create<K>(&self, object: &K) -> Result<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned
            + Serialize,
    {
        let params = PostParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PostParams::default()
        };
        let answer = self.api::<K>().create(&params, object).await;
        answer.map_err(failed("create", self.named::<K>(&object.name_any())))
    }

    /// Deletes the object with its UID as a precondition, so that a later object with the same name is not deleted.
    ///
    /// # Errors
    /// Fails if the API server rejects the request.
    pub async fn delete<K>(&self, object: &K) -> Result<()>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: object.uid(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        let name = object.name_any();
        let answer = self.api::<K>().delete(&name, &params).await;
        answer
            .map(|_| ())
            .map_err(failed("delete", self.named::<K>(&name)))
    }
}
