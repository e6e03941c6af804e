{{- define "diptych.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "diptych.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name }}
{{- end }}
{{- end }}

{{/* Name of the objects of one pool, or of one model's router: (root, role, name). A name is never cut: two could meet. */}}
{{- define "diptych.objectName" -}}
{{- $name := printf "%s-%s-%s" (include "diptych.fullname" .root) .role .name }}
{{- if gt (len $name) 63 }}
{{- fail (printf "the name %s has %d characters, Kubernetes takes 63: shorten the release, fullnameOverride, pool or model" $name (len $name)) }}
{{- end }}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) }}
{{- fail (printf "a Service cannot be called %s: a letter first, then a-z, 0-9 and -; see fullnameOverride" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* Labels that never change, for selectors: (root, role, name), or only (root, role), or only (root). */}}
{{- define "diptych.selectorLabels" -}}
{{- $labels := dict "app.kubernetes.io/name" (include "diptych.name" .root) "app.kubernetes.io/instance" .root.Release.Name }}
{{- with .role }}{{ $_ := set $labels "app.kubernetes.io/component" . }}{{ end }}
{{- with .name }}{{ $_ := set $labels "diptych/pool" . }}{{ end }}
{{- toYaml $labels }}
{{- end }}

{{/*
Every label: (root) and optionally role, name, model, and `extra`, labels of the user's. What selectors need is never
overridden. On pods (`pod`) none that changes with the chart alone: a new chart must not restart what is the same.
*/}}
{{- define "diptych.labels" -}}
{{- $labels := dict "app.kubernetes.io/managed-by" .root.Release.Service "app.kubernetes.io/part-of" "diptych" }}
{{- if not .pod }}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
{{- end }}
{{- $labels = mustMergeOverwrite $labels (mustDeepCopy .root.Values.commonLabels) (mustDeepCopy (.extra | default dict)) }}
{{- with .model }}{{ $_ := set $labels "diptych/model" . }}{{ end }}
{{- toYaml (mustMergeOverwrite $labels (include "diptych.selectorLabels" . | fromYaml)) }}
{{- end }}

{{- define "diptych.serviceAccountName" -}}
{{- $account := index .root.Values.serviceAccount .kind }}
{{- if $account.create }}
{{- $account.name | default (printf "%s-%s" (include "diptych.fullname" .root) .kind) }}
{{- else }}
{{- $account.name | default "default" }}
{{- end }}
{{- end }}

{{- define "diptych.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "diptych.fullname" .)) }}
{{- else }}
{{- .Values.tls.existingSecret }}
{{- end }}
{{- end }}

{{- define "diptych.scheme" -}}
{{- if include "diptych.tlsSecret" . }}https{{ else }}http{{ end }}
{{- end }}

{{- define "diptych.image" -}}
{{- $image := index .root.Values.images .kind }}
{{- if $image.digest }}
{{- printf "%s@%s" $image.repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* Stops with a sentence when something that was asked for needs an API that the cluster does not have: (root, api, for). */}}
{{- define "diptych.requireAPI" -}}
{{- if not (.root.Capabilities.APIVersions.Has .api) }}
{{- fail (printf "%s needs the API %s, which this cluster does not have (helm template: add --api-versions %s)" .for .api .api) }}
{{- end }}
{{- end }}
