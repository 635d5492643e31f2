//! The program in the pod that searches recorded changes.

use std::fs;
use std::path::PathBuf;

use clap::Args;
use store::encryption::Keys;

use super::{FoundBase, KEYS, ROOT, SearchOrder, SearchReport};
use crate::observe::point;
use crate::reason::Trouble;
use crate::seed::{mounted, shorten};
use crate::source;

/// Arguments of the command `search`, which runs in a pod that mounts the PVC.
#[derive(Args, Clone, Debug)]
pub struct Search {
    /// Recorded changes, and the point to find in them, as JSON. Contains no credentials
    #[arg(long, value_name = "JSON", value_parser = parse_order)]
    pub order: SearchOrder,
    /// Directory where the PersistentVolumeClaim is mounted
    #[arg(long, value_name = "DIRECTORY", default_value = ROOT)]
    pub root: PathBuf,
    /// Directory where the Secret with the encryption keys is mounted
    #[arg(long, value_name = "DIRECTORY", default_value = KEYS)]
    pub keys: PathBuf,
    /// File to which the report is written
    #[arg(long, value_name = "FILE", default_value = "/dev/termination-log")]
    pub report: PathBuf,
}

fn parse_order(text: &str) -> Result<SearchOrder, serde_json::Error> {
    serde_json::from_str(text)
}

/// Searches for the point and writes the report. Returns true if the point was found.
pub async fn run(arguments: &Search) -> bool {
    let found = Box::pin(search(arguments)).await;
    let succeeded = found.is_ok();
    let report = match found {
        Ok(found) => SearchReport::Found(Box::new(found)),
        Err(trouble) => SearchReport::Failed {
            reason: trouble.reason.as_str().to_owned(),
            message: shorten(trouble.message),
        },
    };
    let text = serde_json::to_string(&report).unwrap_or_default();
    if let Err(error) = fs::write(&arguments.report, &text) {
        tracing::warn!(%error, "cannot write the report for the kubelet");
    }
    tracing::info!(report = text, "the search ended");
    succeeded
}

async fn search(arguments: &Search) -> Result<FoundBase, Trouble> {
    let SearchOrder {
        directory,
        at,
        complete,
        encryption,
    } = &arguments.order;
    let data = match encryption {
        Some(_) => mounted(Some(&arguments.keys))?,
        None => None,
    };
    let keys = data.as_ref().map(Keys::of);
    let opened = source::open(directory, None, None, Some(&arguments.root)).await?;
    let secret = encryption.as_deref();
    let found = point::find_in(&opened, directory, (at, *complete), (keys, secret));
    Box::pin(found).await
}
