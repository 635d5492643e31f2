//! Sends calls to etcd.

use std::sync::Arc;

use futures::FutureExt;
use kube::ResourceExt;

use crate::action::{AuthChange, EtcdCall};
use crate::execute::{Error, ExecuteContext};

impl ExecuteContext<'_> {
    /// Sends one call; a change of the member list goes to the client URLs in `via`. `text` describes the call in
    /// errors.
    pub(super) async fn call(
        &self,
        call: &EtcdCall,
        via: &[String],
        text: &str,
    ) -> Result<(), Error> {
        let answer = match call {
            EtcdCall::AddMember { url, learner } => {
                let url = std::slice::from_ref(url);
                match self.etcd.add_member(via, url, *learner).await {
                    // The call counts as successful, because an earlier attempt added the member with this peer URL,
                    // and only the answer of etcd was lost.
                    Err(etcd::Error::PeerUrlExists) => Ok(()),
                    answer => answer.map(|_| ()),
                }
            }
            EtcdCall::UpdatePeerUrls { id, urls } => self.etcd.update_member(via, *id, urls).await,
            EtcdCall::Promote { id } => self.etcd.promote_member(via, *id).await,
            EtcdCall::Remove { id, .. } => match self.etcd.remove_member(via, *id).await {
                Err(etcd::Error::MemberNotFound) => Ok(()),
                answer => answer,
            },
            EtcdCall::MoveLeader { from, id } => {
                self.etcd.move_leader(&self.client_url(from), *id).await
            }
            EtcdCall::Downgrade { to } => self.etcd.downgrade(via, to.as_deref()).await,
            EtcdCall::Defragment { member, recorded } => {
                // `begin` runs the call in the background, because a defragmentation may take minutes. A later
                // observation reads the result.
                let (etcd, url) = (Arc::clone(self.etcd), self.client_url(member));
                let call = async move { etcd.defragment(&url).await };
                let cluster = self.cluster.uid().unwrap_or_default();
                let what = (member.clone(), *recorded);
                self.calls.begin(&cluster, what, call.boxed());
                Ok(())
            }
            EtcdCall::Compact { revision, via } => {
                self.etcd.compact(&self.client_urls(via), *revision).await
            }
            EtcdCall::AppendEntries { member, until } => {
                let url = self.client_url(member);
                self.etcd.append_entries(&url, *until).await
            }
            EtcdCall::Disarm { alarm, via } => {
                self.etcd.disarm(&self.client_urls(via), *alarm).await
            }
            EtcdCall::Auth { change, via } => {
                let via = self.client_urls(via);
                match change {
                    AuthChange::Enable => self.etcd.enable_auth(&via).await,
                    AuthChange::Disable => self.etcd.disable_auth(&via).await,
                    AuthChange::ChangePassword => self.etcd.change_password(&via).await,
                }
            }
        };
        answer.map_err(|source| Error::Etcd {
            what: text.to_owned(),
            source,
        })
    }

    pub(super) fn client_urls(&self, members: &[String]) -> Vec<String> {
        members.iter().map(|name| self.client_url(name)).collect()
    }

    /// The client URL of a member: the address of its pod, the advertised URL of an external member, or else the URL of
    /// the member's Service.
    fn client_url(&self, member: &str) -> String {
        let known = self.urls.get(member);
        let known = known.or(self.observed.elsewhere.get(member));
        known
            .cloned()
            .unwrap_or_else(|| member::addresses(self.cluster).client_url(member))
    }
}
